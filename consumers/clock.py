"""Number the versions of a model for the trainer that drives its clock (T1, T2, T13)."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights.claim import claim, claimed
from penstock.errors import ProtocolError, PublishError
from penstock.protocol import scripts
from penstock.protocol.position import read_lineage
from penstock.protocol.presence import read_workers
from penstock.protocol.scripts import loading_of, read_all_whole, read_whole
from penstock.records.codec import count_of
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.commands import Client
from penstock.system.disk import until_room

log = logging.getLogger(__name__)

#: Most repeated announcements of a version after engines crashed on it.
MAX_REPEATS = 3


class Clock:
    """Read and advance a model's version for one trainer. Every method blocks for one or two round trips.

    Args:
        subscriber: subscription of the trainer, which owns the clock if it is driving.
        weights: folder of published versions.
    """

    def __init__(self, subscriber: Subscriber, model: str, weights: Path) -> None:
        self._subscriber = subscriber
        self._weights = weights
        #: Newest version at which this trainer, or a restored checkpoint, trained a batch; equal on all ranks.
        self.seen = 0
        self.model = model
        #: Version that this trainer announced last; 0 before the first.
        self.last = 0
        #: True between a rewind and the publication that must follow it.
        self.must_publish = False
        #: Newest version known to any process when the next version was numbered.
        self._known = 0
        #: True once missing publications were logged.
        self._warned = False

    @property
    def _keys(self) -> Keys:
        return self._subscriber.keys

    def see(self, version: int) -> None:
        """Record that a policy of this version existed, so that its number is not reused."""
        self.seen = max(self.seen, version)

    def read(self) -> int:
        """Return the version of the last publication; 0 before the first. Raises ProtocolError if it is invalid."""
        field = scripts.version_field(self.model)
        version = self._subscriber.control.do(lambda client: client.hget(self._keys.clock, field))
        return count_of(version, f"The newest version of model {self.model!r}")

    def check_lost(self, clock: int) -> None:
        """Raise ProtocolError if Redis has lost a version that this trainer announced."""
        if clock < self.last and not self.must_publish:
            raise ProtocolError(
                f"This trainer published version {self.last}, but the newest version in Redis is {clock}: Redis lost "
                "acknowledged writes, as in a failover. Restore the last checkpoint."
            )

    def check_batch(self, n: int, train_version: int, committed: int) -> None:
        """Check that the manifest of a new batch ``n`` has the trainer's current version (T2).

        Args:
            committed: batch that was committed last.

        Raises ProtocolError if a later version is already published; warns once if that version is not published yet.
        """
        clock = self.read()
        self.check_lost(clock)
        if clock > train_version:
            raise ProtocolError(
                f"Batch {n} was cut for version {train_version}, but version {clock} is published: "
                "publish once every trainer.batches_per_version batches."
            )
        # A caller that takes a batch before training the previous one publishes in between.
        if clock < train_version and n == committed + 1 and not self._warned:
            self._warned = True
            log.warning(
                "batch %d was cut for version %d, but only version %d is published: publish after every batch whose "
                "number is a multiple of trainer.batches_per_version, before the next batch, or staleness is wrong",
                n,
                train_version,
                clock,
            )

    def next_version(self) -> tuple[int, list[list[int]]]:
        """Return the number of the next publication, and the ranges of abandoned versions.

        The number is above every version that an engine has or is loading, a folder contains, a trainer claimed, or a
        checkpoint was trained at, so that a number never identifies two sets of weights (T1), even after a failover or
        a power loss that lost publications.
        """
        clock = self.read()
        self.check_lost(clock)
        workers = self._subscriber.control.do(lambda client: read_workers(client, self._keys, all_=True))
        held = [worker.version for worker in workers]
        about = self._subscriber.control.do(lambda client: client.hgetall(self._keys.loading(self.model)))
        loading = [version for name, data in about.items() for version in loading_of(name, data)[2]]
        known = (*held, *loading, *versions_in(self._weights), claimed(self._weights), self.seen)
        self._known = max(known)
        gone = [[clock + 1, self._known]] if self._known > clock else []
        if gone:
            log.warning("versions %d to %d are lost; the next one is %d", clock + 1, self._known, self._known + 1)
        return max(clock, self._known) + 1, self._abandoned() + gone

    def claim_next(self) -> tuple[int, list[list[int]]]:
        """Reserve and return the number of ``next_version`` for an announcement without a folder.

        Blocks for the disk, and reports a wait for space. Raises PublishError.
        """

        def once() -> tuple[int, list[list[int]]]:
            version, abandoned = self.next_version()
            self.claim(version)
            return version, abandoned

        return until_room(once, blocked_on=self._subscriber.waiting.blocked_on)

    def claim(self, version: int) -> None:
        """Reserve a version number. Raises PublishError, DiskFull."""
        claim(self._weights, version)

    def _abandoned(self) -> list[list[int]]:
        """Return the versions abandoned by rewinds of this subscription."""
        name = self._subscriber.name
        raw = self._subscriber.control.do(lambda client: client.hget(self._keys.sub(name), "abandoned"))
        return [list(span) for span in read_lineage(raw, None, name).abandoned]

    def newest(self) -> Publication:
        """Return the last publication, with its folder if complete. Raises PublishError before the first."""
        entries = self._subscriber.control.do(lambda client: client.xrevrange(self._keys.weights(self.model), count=1))
        if not entries:
            raise PublishError(f"Model {self.model!r} has no version yet: publish its weights before tick().")
        found = Publication.from_bytes(entries[0][1].get(b"p", b""), "publication")
        return self._subscriber.control.do(lambda client: read_whole(client, self._keys, found)) or found

    def announced(self) -> Publication | None:
        """Return the last publication; None before the first."""
        return self.newest() if self.read() else None

    def announce_again(self, bound: int) -> None:
        """Announce the last version again if engines crashed on it and no older version can be served.

        Blocks for a round trip, usually. Raises PublishError after ``MAX_REPEATS`` repetitions.

        Args:
            bound: largest age, in versions, of an older version that may be served; 0 allows none.
        """
        if not self.last or self.must_publish:
            return
        aside = self._subscriber.control.do(lambda client: client.hgetall(self._keys.aside(self.model)))
        if not aside:
            return
        entries = self._subscriber.control.do(lambda client: client.xrevrange(self._keys.weights(self.model), count=16))
        newest = Publication.from_bytes(entries[0][1].get(b"p", b""), "publication")
        detail = aside.get(newest.id.encode())
        if newest.version != self.last or detail is None:
            return
        others = self._with_folders([fields for entry, fields in entries if entry not in aside]) - {newest.version}
        if any(newest.version - v <= bound and not newest.abandons(v) for v in others):
            return
        if newest.rev >= MAX_REPEATS:
            raise PublishError(
                f"Engines crashed on version {newest.version} of model {self.model!r} before producing output after "
                f"each of its {newest.rev + 1} announcements; last error: {detail.decode(errors='replace')[:2000]}. "
                "Restore an earlier checkpoint, or check the engine's log for the cause."
            )
        with_folder = self.newest()
        if with_folder.id != newest.id or not with_folder.is_whole:
            return  # retry when the folder is complete
        log.error("announcing version %d again: engines crashed on it before producing output", newest.version)
        again = replace(with_folder, rev=newest.rev + 1, transport="disk", published_s=time.time())
        self.announce(again)

    def _with_folders(self, entries: list[dict[bytes, bytes]]) -> set[int]:
        """Return the versions of these publications that have a folder, from which an engine can start."""
        found = [Publication.from_bytes(fields.get(b"p", b""), "publication") for fields in entries]
        with_folder_ids = self._subscriber.control.do(lambda client: read_all_whole(client, self._keys, self.model))
        return {one.version for one in found if one.is_whole or one.version in with_folder_ids}

    def announce(self, publication: Publication) -> int:
        """Advance the clock to ``publication``; return its version.

        Raises:
            ProtocolError: the record is too large for workers; nothing was announced.
            PublishError: the number is not the next one, no new batch was committed, or another trainer owns the
            subscription.
        """
        record = publication.to_bytes()
        Publication.from_bytes(record, "The publication")
        self.last = self._subscriber.control.call(
            scripts.publish(
                self._keys,
                self._subscriber.name,
                owner=self._subscriber.owner,
                gen=self._subscriber.gen,
                model=self.model,
                version=publication.version,
                through=publication.through,
                step=publication.step,
                record=record,
                rev=publication.rev,
                known=self._known,
            )
        )
        self.must_publish = False
        return self.last

    def ask_evaluation(self, version: int, end: str) -> None:
        """Request an evaluation of ``version``, see ``Trainer.ask_evaluation``."""
        # Stored as notes, which a full Redis accepts, because the run is ending. ``end`` is written before the version.
        control = self._subscriber.control
        control.call(scripts.note(self._keys, self._keys.source, "final_end", f"{version} {end}".encode()))
        control.call(scripts.note(self._keys, self._keys.clock, "final", str(version).encode()))

    def asked_last(self, end: str) -> int:
        """Return the newest version if it was requested with this ``end``, else 0."""

        def read(client: Client) -> list[Any]:
            pipe = client.pipeline(transaction=True)
            pipe.hmget(self._keys.clock, "final", scripts.version_field(self.model))
            pipe.hget(self._keys.source, "final_end")
            return list(pipe.execute())

        (final, newest), words = self._subscriber.control.do(read)
        same = final is not None and final == newest and words == final + f" {end}".encode()
        return count_of(final, "The last version to be evaluated") if same else 0


def folder_of(weights: Path, version: int) -> Path:
    """Return the path of a version in the folder of published versions."""
    return weights / f"v{version:08d}"


def versions_in(folder: Path) -> list[int]:
    """Return the complete versions in a folder, ascending."""
    return sorted(int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit() and path.is_dir())


def weights_dir_of(config: Config) -> Path:
    """Return the folder of a run's published versions."""
    return Path(config.trainer.weights_dir or config.run_dir / "weights").absolute()
