"""Publish a trainer's weights: number, announce, send and write versions, and keep folders that are needed.

    other ranks   publish ─> follow rank 0 through its walks (rank_barrier.py)
    rank 0        every rank has committed ─> copy ─> claim a number ─> open ─> announce ─> send ─> write
                  or, the folder first ─> number ─> write, claim it ─> open ─> announce ─> send

Every step after the announcement may fail without harm: the folder exists or is written later (checkpoint_writer.py),
and workers that missed the transfer load it.
"""

import logging
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.consumers.clock import Clock, folder_of, weights_dir_of
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.progress import Progress
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import write
from penstock.consumers.weights.checkpoint_writer import CheckpointWriter, versions_in_use
from penstock.consumers.weights.copies import CheckedSource
from penstock.consumers.weights.deltas import Deltas
from penstock.consumers.weights.rank_barrier import RankBarrier
from penstock.consumers.weights.sender import Sender, Transfer, deliver, quietly, sender_of
from penstock.consumers.weights.sources import Source, Weights, as_source, buckets
from penstock.consumers.weights.static_files import StaticFiles
from penstock.errors import ProtocolError, PublishError, WeightsNotFinite
from penstock.names import Lane
from penstock.protocol import transfers
from penstock.protocol.presence import WorkerPresence, WorkerState, live_workers
from penstock.protocol.scripts import cohorts_in
from penstock.records.codec import LEAST
from penstock.records.publication import Publication
from penstock.system.disk import until_room
from penstock.text import safe_repr
from penstock.weights.delta_store import WRITER, DeltaStore

log = logging.getLogger(__name__)

#: Consecutive refused publications that end the run.
MAX_SKIPPED = 3
#: Workers send a heartbeat every 0.5 s; workers silent for longer than this are skipped.
READY_S = 2.0
#: With transport delta one of so many versions is stored complete, besides the changes since the version before.
ANCHOR_EVERY = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a transfer."""

    transport: str
    #: Recipients.
    workers: tuple[str, ...]
    #: '' on success.
    failure: str
    #: Seconds of waiting for workers, and of sending.
    wait_s: float
    send_s: float


class Publisher:
    """Publish the versions of one trainer's weights. All ranks have one; rank 0 leads."""

    def __init__(
        self, config: Config, subscriber: Subscriber, clock: Clock, progress: Progress, tally: Tally | None = None
    ) -> None:
        self.config = config
        self._subscriber, self._keys, self._control = subscriber, subscriber.keys, subscriber.control
        self._waiting = subscriber.waiting
        self._clock, self._progress, self._tally = clock, progress, tally or Tally()
        self._barrier = RankBarrier(subscriber, config.trainer.rank_timeout_s)
        #: Result of the last transfer.
        self.last: Sent | None = None
        #: Consecutive publications refused because their weights hold NaN or Inf.
        self.skipped_in_a_row = 0
        #: Sender of the transport; None: engines load the folder.
        self.sender: Sender | None = None
        if (sender := sender_of(config.trainer.transport)) is not None:
            sender.set_up()
            self.sender = sender(config.trainer)
        #: Writer of the delta store; None with another transport.
        self.deltas: Deltas | None = None
        if config.trainer.transport == "delta":
            store = DeltaStore(config.delta_store, WRITER, lambda cause: self._waiting.blocked_on(cause))
            in_use = partial(versions_in_use, self._control, self._keys, config.model.name)
            self.deltas = Deltas(store, ANCHOR_EVERY, in_use)
        serves = config.serving.enabled and subscriber.seat.leads and subscriber.model
        self._serving = StaticFiles(config, subscriber) if serves else None
        #: Writes the folders of versions that are sent first.
        self.writer = CheckpointWriter(config, subscriber, self._serving)

    def close(self) -> None:
        """Write the newest version's folder, then stop sending and serving. Blocks for the disk."""
        self.writer.close()
        if self._serving is not None:
            self._serving.close()
        if self.sender is not None:
            quietly(self.sender.close)

    def publish(self, weights: Weights, *, step: int | None, timeout_s: float) -> int:
        """Write the next version and announce it, see ``Trainer.publish``."""
        leads, source = self._leads("publish"), as_source(weights)
        if not leads:
            if source.is_sharded:
                self._clock.last = self._barrier.follow(source, self._model_config())
            return self._clock.last
        source = self._barrier.lead(source)
        try:
            draft = self._draft(step, timeout_s)
            try:
                (self._send_first if self._sends_first() else self._write_first)(source, draft)
                self.skipped_in_a_row = 0
            except WeightsNotFinite as exc:
                self._skip(exc, draft)
        except BaseException as exc:
            self._barrier.fail(exc)
            raise
        self._barrier.finish(self._clock.last)
        return self._clock.last

    def tick(self, *, step: int | None, timeout_s: float) -> int:
        """Publish the next version with the weights of the last one, see ``Trainer.tick``."""
        if not self._leads("tick"):
            return self._clock.last
        if self._clock.must_publish:
            raise ProtocolError("Publish the restored weights before tick(): the last version may be abandoned.")
        return self._announce_again(self._draft(step, timeout_s))

    def pin(self, version: int, name: str) -> Path:
        """Keep the folder of ``version`` for ``name``, see ``Trainer.pin``."""
        pins = self._keys.pins(self._clock.model)
        self._control.do(lambda client: client.hset(pins, name, version))
        folder = folder_of(weights_dir_of(self.config), version)
        try:
            if not folder.is_dir():
                self.writer.settle()
            if folder.is_dir():
                return folder
            raise PublishError(f"Version {version} is no longer kept: raise trainer.keep_versions, or pin it earlier.")
        except BaseException:
            self.unpin(name)
            raise

    def unpin(self, name: str) -> None:
        """Remove the pin ``name``, so that its folder may be deleted. Blocks for one round trip."""
        pins = self._keys.pins(self._clock.model)
        self._control.do(lambda client: client.hdel(pins, name))

    def _leads(self, verb: str) -> bool:
        """Return whether this is rank 0; raise ProtocolError if its role does not drive the clock."""
        seat = self._subscriber.seat
        if not seat.drives:
            raise ProtocolError(f"Role {seat.role} may not {verb}(): only role {seat.roles[0]} drives the clock.")
        return bool(seat.leads)

    def _draft(self, step: int | None, timeout_s: float) -> Callable[..., Publication]:
        """Return a constructor of the next publication, once every rank has committed its batches."""
        number = None if step is None else _whole(step)
        with self._tally.waiting("ranks"):
            through = self._progress.await_ranks(timeout_s)

        def draft(**fields: Any) -> Publication:
            about = {"transport": self.config.trainer.transport, "published_s": time.time(), **fields}
            return Publication(self._clock.model, step=through if number is None else number, through=through, **about)

        return draft

    def _skip(self, exc: WeightsNotFinite, draft: Callable[..., Publication]) -> None:
        """Count a refused publication, and announce the last version's weights under the next number instead.

        Without a new number the staleness bound would stop admission, and the trainer would wait forever.

        Raises:
            WeightsNotFinite: there is no earlier version, or this was the last of ``MAX_SKIPPED`` in a row.
        """
        self.skipped_in_a_row += 1
        self._tally.skip_publication()
        if self._clock.must_publish or not self._clock.last:
            raise WeightsNotFinite(
                f"{exc} There is no earlier version to continue with: start from a checkpoint or a model.path with "
                "finite weights."
            ) from exc
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise WeightsNotFinite(
                f"{exc} This is publication {self.skipped_in_a_row} in a row that was refused, so the run stops: lower "
                "trainer.lr, and continue from a checkpoint with finite weights."
            ) from exc
        version = self._announce_again(draft)
        log.warning(
            "publication skipped (%d in a row): %s Engines keep the weights of the version before, as version %d.",
            self.skipped_in_a_row,
            exc,
            version,
        )

    def _sends_first(self) -> bool:
        """Return whether to send before the folder is written: never the first version, or the one after a rewind."""
        needs_folder = self.deltas is not None or (self.sender is not None and self.sender.needs_folder)
        is_late = not self._clock.must_publish and self._clock.last and not self.writer.owes
        return bool(is_late and not needs_folder and not self.config.trainer.folder_first)

    def _write_first(self, source: Source, draft: Callable[..., Publication]) -> None:
        self.writer.rest()
        began = time.monotonic()
        version, abandoned = self._clock.next_version()
        claim = cache(lambda: self._clock.claim(version))  # an attempt may fail after it
        written = self.writer.write_folder(CheckedSource(source), version, self._control, self._waiting, claim=claim)
        if (deltas := self.deltas) is not None:
            before = self._clock.announced()
            until_room(lambda: deltas.put(written, version, before, abandoned), blocked_on=self._waiting.blocked_on)
        write_s = time.monotonic() - began
        publication = draft(
            version=version,
            abandoned=abandoned,
            path=str(written.path),
            index=written.index_digest,
            num_bytes=written.num_bytes,
            write_s=write_s,
        )
        self._announce(publication)
        self.writer.forgive()
        self._send(source, publication)
        self._tally.publish(written.num_bytes, write_s, time.monotonic() - began - write_s)

    def _send_first(self, source: Source, draft: Callable[..., Publication]) -> None:
        began, before = time.monotonic(), self._clock.last
        copy = self.writer.copy(source)
        write.check_layout(copy.layout, Path(self.config.model.path))
        version, abandoned = self._clock.claim_next()
        copy_s = time.monotonic() - began
        publication = draft(
            version=version, abandoned=abandoned, path="", layout=copy.layout_digest, num_bytes=copy.num_bytes
        )
        self._announce(publication)
        try:
            self._send(copy, publication, after=before)
        finally:
            self.writer.put(version, copy)
        self._tally.publish(copy.num_bytes, copy_s, time.monotonic() - began - copy_s)

    def _announce_again(self, draft: Callable[..., Publication]) -> int:
        """Announce the weights of the last version, once they have a folder, under the next number; return it."""
        self.writer.settle()
        before = self._clock.newest()
        if not before.is_whole:
            raise PublishError(f"Version {before.version} has no folder: publish its weights before tick().")
        version, abandoned = self._clock.claim_next()
        self._announce(
            draft(version=version, abandoned=abandoned, transport="disk", path=before.path, index=before.index)
        )
        return version

    def _announce(self, publication: Publication) -> None:
        """Open the enrollment for a version that is sent, announce it, and serve its folder over HTTP if enabled.

        Raises PublishError if another trainer has the subscription, whose transfers must not be disturbed.
        """
        sub, model = self._subscriber, publication.model
        if self.sender is not None and publication.transport != "disk":
            call = transfers.open_(sub.keys, sub.name, model, publication.id, owner=sub.owner, gen=sub.gen)
            if not self._control.call(call):
                raise PublishError(
                    f"Version {publication.version} of model {model!r} cannot be announced: another trainer has "
                    f"subscription {sub.name!r} by now, or it was rewound."
                )
            self.sender.begin(publication)
        self._clock.announce(publication)
        if self._serving is not None and publication.index:
            self._serving.offer(publication.version, publication.index, Path(publication.path))

    def _send(self, source: Source, publication: Publication, after: int = 0) -> None:
        """Send an announced version to the ready workers; failures are logged, and those workers load the folder.

        Blocks; each wait at most ``trainer.transfer_timeout_s``.

        Args:
            after: wait only for workers that have this version or wait for its folder, and can thus receive at once;
                0: for all that serve.
        """
        if self.sender is None:
            return
        began, trainer = time.monotonic(), self.config.trainer
        walk = buckets(source, self._model_config(), trainer.bucket_bytes)
        transfer = Transfer(publication, trainer, walk, keys=self._keys, control=self._control, waiting=self._waiting)
        transfer.await_workers(lambda: self._ready(publication, after))
        waited, failure = time.monotonic(), ""
        if transfer.workers:
            failure = deliver(self.sender, transfer)
        transfer.close(failure)
        ended = time.monotonic()
        self.last = Sent(publication.transport, tuple(transfer.workers), failure, waited - began, ended - waited)

    def _ready(self, new: Publication, after: int) -> set[str]:
        """Return the workers that enroll: those that serve an older version, or, with ``after``, can receive now.

        The latter know the layout, and have that version or wait for its folder; they need not drain first. A worker
        that waits for a folder receives the next version; otherwise it would stay behind while the disk is slower than
        a step.
        """
        if not after:
            return {one.name for one in self._serving_workers() if one.version < new.version}
        config, drains = self.config, self.config.staleness.rules.drains
        if config.data.eval_pinned and self._control.do(lambda client: client.zcard(self._keys.unfinished(Lane.EVAL))):
            return set()
        if drains:
            cohorts = self._control.do(lambda client: client.hkeys(self._keys.cohorts))
            if any(one < new.version for one in cohorts_in(cohorts)):
                return set()  # no worker loads before the cohort has ended (T5)
        drains = drains or config.worker.apply == "drain"
        return {
            one.name
            for one in self._serving_workers()
            if one.layout == new.layout
            and after in (one.version, one.awaits)
            and one.age_s <= READY_S
            and not (drains and one.running)
        }

    def _serving_workers(self) -> list[WorkerPresence]:
        workers = self._control.do(lambda client: live_workers(client, self._keys))
        return [one for one in workers if one.state == WorkerState.SERVING and one.ranks]

    def _model_config(self) -> dict[str, Any]:
        return write.require_config(Path(self.config.model.path))


def _whole(step: int) -> int:
    """Return ``step`` as an integer that a record can hold; raise PublishError otherwise."""
    try:
        if LEAST <= (whole := operator.index(step)) <= -LEAST - 1:
            return whole
    except TypeError:
        pass
    raise PublishError(f"The step of a publication is {safe_repr(step)}: give publish() an integer of 64 bits.")
