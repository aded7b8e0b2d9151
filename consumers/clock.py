"""The clock of a model: the numbers of its versions, as counted by the trainer that drives it (T1, T2, T13)."""

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

#: Times that a version is announced again after engines crashed on it.
AGAIN = 3


class Clock:
    """One trainer's view of a model's versions. Every method blocks for a round trip or two.

    Args:
        subscriber: the trainer's subscription; if it drives, it owns the clock.
        weights: folder of published versions.
    """

    def __init__(self, subscriber: Subscriber, model: str, weights: Path) -> None:
        self._subscriber = subscriber
        self._weights = weights
        #: Newest version at which this trainer, or a restored checkpoint, trained a batch; equal on all ranks.
        self.seen = 0
        self.model = model
        #: Version that this trainer announced last; 0: none.
        self.last = 0
        #: True between a rewind and the publication that must follow it.
        self.must_publish = False
        #: Newest version seen by any part when the next one was numbered.
        self._known = 0
        #: True once missing publications were logged.
        self._warned = False

    @property
    def _keys(self) -> Keys:
        return self._subscriber.keys

    def see(self, version: int) -> None:
        """Note that a policy of this version existed: the number must not be used for another one."""
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
                f"This trainer published version {self.last}, and Redis knows {clock} as the newest: it lost "
                "acknowledged writes, as after a failover. Restore the last checkpoint."
            )

    def check_batch(self, n: int, train_version: int, committed: int) -> None:
        """Check that the manifest of a new batch ``n`` has the version that the trainer holds now (T2).

        Args:
            committed: batch that was committed last.

        Raises ProtocolError if a later version is published already; warns once if that version is not yet.
        """
        clock = self.read()
        self.check_lost(clock)
        if clock > train_version:
            raise ProtocolError(
                f"Batch {n} was cut for version {train_version}, but version {clock} is published: "
                "publish once every trainer.batches_per_version batches."
            )
        # A caller that takes a batch before it has trained the previous one publishes in between.
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
        """Return the number of the next publication, and the versions abandoned until then.

        It is above every version that an engine holds or is about to load, a folder has, a trainer claimed or a
        checkpoint was trained at, so that no number names two sets of weights (T1), even after a failover or a power
        loss that lost publications.
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
        """Return and reserve the number of ``next_version``, before it is announced without a folder.

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
        """Return the last publication, with its folder if that is complete. Raises PublishError before the first."""
        entries = self._subscriber.control.do(lambda client: client.xrevrange(self._keys.weights(self.model), count=1))
        if not entries:
            raise PublishError(f"Model {self.model!r} has no version yet: publish its weights before tick().")
        found = Publication.from_bytes(entries[0][1].get(b"p", b""), "publication")
        return self._subscriber.control.do(lambda client: read_whole(client, self._keys, found)) or found

    def announced(self) -> Publication | None:
        """Return the last publication; None before the first."""
        return self.newest() if self.read() else None

    def announce_again(self, bound: int) -> None:
        """Announce the last version once more if engines crashed on it and no older one is served instead.

        Blocks for a round trip, usually. Raises PublishError after ``AGAIN`` repetitions.

        Args:
            bound: age in versions of an older version that may be served instead; 0: none may.
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
        if newest.rev >= AGAIN:
            raise PublishError(
                f"Engines died on version {newest.version} of model {self.model!r} in each of its {newest.rev + 1} "
                f"announcements and finished nothing, the last time so: {detail.decode(errors='replace')[:2000]}. "
                "Restore an earlier checkpoint, or see in the engine's log what its weights break."
            )
        with_folder = self.newest()
        if with_folder.id != newest.id or not with_folder.is_whole:
            return  # try again when its folder is complete
        log.error("announcing version %d again: engines crashed on it before producing output", newest.version)
        again = replace(with_folder, rev=newest.rev + 1, transport="disk", published_s=time.time())
        self.announce(again)

    def _with_folders(self, entries: list[dict[bytes, bytes]]) -> set[int]:
        """Return the versions among these publications with which an engine can be started."""
        found = [Publication.from_bytes(fields.get(b"p", b""), "publication") for fields in entries]
        told = self._subscriber.control.do(lambda client: read_all_whole(client, self._keys, self.model))
        return {one.version for one in found if one.is_whole or one.version in told}

    def announce(self, publication: Publication) -> int:
        """Move the clock to ``publication``; return its version.

        Raises:
            ProtocolError: too large for a worker to read; nothing was announced.
            PublishError: its number is not the next one, nothing new was committed, or another trainer owns the
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
        """Have ``version`` evaluated, see ``Trainer.ask_evaluation``."""
        # Stored as notes, which a full Redis accepts: the run is at its end. ``end`` is written before the version.
        control = self._subscriber.control
        control.call(scripts.note(self._keys, self._keys.source, "final_end", f"{version} {end}".encode()))
        control.call(scripts.note(self._keys, self._keys.clock, "final", str(version).encode()))

    def asked_last(self, end: str) -> int:
        """Return the newest version, if it was requested with this ``end``; else 0."""

        def look(client: Client) -> list[Any]:
            pipe = client.pipeline(transaction=True)
            pipe.hmget(self._keys.clock, "final", scripts.version_field(self.model))
            pipe.hget(self._keys.source, "final_end")
            return list(pipe.execute())

        (final, newest), words = self._subscriber.control.do(look)
        same = final is not None and final == newest and words == final + f" {end}".encode()
        return count_of(final, "The last version to be evaluated") if same else 0


def folder_of(weights: Path, version: int) -> Path:
    """Return the path of a version under the folder of published ones."""
    return weights / f"v{version:08d}"


def versions_in(folder: Path) -> list[int]:
    """Return the complete versions under a folder, ascending."""
    return sorted(int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit() and path.is_dir())


def weights_dir_of(config: Config) -> Path:
    """Return the folder of a run's published versions."""
    return Path(config.trainer.weights_dir or config.run_dir / "weights").absolute()
