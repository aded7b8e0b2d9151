"""Write and verify the weights of ``Trainer.publish``, then send them to engines that are ready.

    all ranks    gather, for the folder or a copy ─────────────> gather again, if the folder is written first
    rank 0       write, read back; or copy ─> open ─> announce ─> wait for workers ─> decide ─> send ─> done

Every step after the announcement may fail without harm: the folder exists or is written later (behind.py), and workers
that missed the transfer load it.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from redis.exceptions import ResponseError

from penstock.config import Config
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import publish
from penstock.consumers.weights.copies import Copy
from penstock.consumers.weights.deltas import deltas_of
from penstock.consumers.weights.publish import Written
from penstock.consumers.weights.sources import Source, buckets
from penstock.consumers.weights.transfer import Bucket, Transfer, TransferFailed
from penstock.consumers.weights.transports.sender import Sender, sender_of
from penstock.errors import Fenced, OwnershipLost, PublishError, QueueFull, QueueUnavailable, WaitTimeout
from penstock.names import Lane
from penstock.protocol import scripts, transfers
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState, live_workers
from penstock.protocol.scripts import cohorts_in, loading_of
from penstock.records.causes import RankPublishing, RanksAbsent
from penstock.records.publication import Order, Publication
from penstock.redis.control import Control
from penstock.redis.refusals import in_words
from penstock.system.disk import until_room
from penstock.text import format_exc

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Polling interval for the other ranks, which doubles.
LOOK_S, LONGEST_LOOK_S = 0.001, 0.01


class Orders:
    """Synchronize a trainer's ranks while rank 0 publishes weights of which the others hold parts. Not thread-safe.

        rank 0        give walk ─> all walk ─> disk, workers, Redis ─> ... ─> end done VERSION | failed WHY
        other ranks   hear ──────> all walk ─> hear ──────────────────> ... ─> hear

    Orders go through Redis: waits for them are reported and last as long as rank 0 lives. The walk is the only
    collective and begins once all ranks are ready, so it does not time out while rank 0 waits for a disk.

    Args:
        timeout_s: longest wait of rank 0 for other ranks, and of those for a rank 0 that does not renew its lease.
    """

    def __init__(self, subscriber: Subscriber, timeout_s: float) -> None:
        self._subscriber = subscriber
        self._timeout_s = timeout_s
        #: Publications of sharded weights so far, the same on every rank; completed orders of the current one.
        self._call = self._place = 0

    def begin(self) -> None:
        """Begin the orders of one publication, on every rank."""
        self._call, self._place = self._call + 1, 0

    def give(self, order: Order) -> None:
        """Give an order once all ranks wait for it; block until they have received it.

        Raises:
            WaitTimeout: ranks did not arrive; names them.
            OwnershipLost: another trainer has the subscription, or it was rewound.
            ProtocolError: the key of the orders is of another type.
        """
        deadline = time.monotonic() + self._timeout_s
        self._until(self._place, None, deadline)
        self._until(self._place + 1, order, deadline)
        self._subscriber.waiting.end()
        self._place += 1

    def end(self, order: Order) -> None:
        """Give the last order of a publication. Blocks for a round trip. Raises ProtocolError as ``give``."""
        self._ask(self._order(order))

    def fail(self, why: str) -> None:
        """Try ``end`` once; if Redis is gone the ranks see the lease expire. Blocks for a round trip."""
        try:
            scripts.run(self._subscriber.control.client, self._order(Order("failed", reason=why)))
        except Exception as exc:  # why it failed is what matters
            log.warning("failed to notify the other ranks that the publication failed: %s", exc)

    def _until(self, place: int, order: Order | None, deadline: float) -> None:
        """Write ``order`` until every rank waits for the order number ``place``."""
        seat, waiting, pause_s = self._subscriber.seat, self._subscriber.waiting, LOOK_S
        while True:
            places = self._ask(self._order(order))
            if places is None:
                raise self._subscriber.ownership.not_ours()
            absent = tuple(seat.name_of(rank) for rank, at in enumerate(places, start=1) if at < place)
            if not absent:
                return
            cause = RanksAbsent(absent, "publish")
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{', '.join(absent)} did not come to publish in {self._timeout_s:g} s: dead or stuck; stop all "
                    "ranks.",
                    count=sum(at >= place for at in places),
                    cause=cause,
                )
            waiting.blocked_on(cause)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    def _order(self, order: Order | None) -> scripts.Call[list[int] | None]:
        sub = self._subscriber
        return scripts.order(
            sub.keys,
            sub.name,
            owner=sub.owner,
            gen=sub.gen,
            call=self._call,
            place=self._place,
            word="" if order is None else order.to_text(),
            ranks=sub.seat.ranks,
        )

    def hear(self) -> Order:
        """Return the next order; block until it is given.

        Raises:
            OwnershipLost: another trainer has the subscription, or rank 0 renewed its lease for ``timeout_s`` no more.
            PublishError: rank 0 is at another publication.
            ProtocolError: malformed order in Redis.
        """
        sub, pause_s, alive_s = self._subscriber, LOOK_S, time.monotonic()
        while True:
            current = self._look()
            if current.order is not None:
                self._place += 1
                self._look()  # acknowledge: rank 0 continues when all ranks have
                sub.waiting.end()
                return current.order
            if current.call > self._call:
                raise PublishError(
                    "Rank 0 is at another publication of weights than this rank: call publish equally often on every "
                    "rank, and stop all ranks if it failed on one."
                )
            now = time.monotonic()
            alive_s = now if current.is_alive else alive_s
            if now - alive_s > self._timeout_s:
                raise OwnershipLost(
                    f"Rank 0 of subscription {sub.name!r}, whose weights are to be published, has not renewed its "
                    f"lease for {self._timeout_s:g} s: it is dead or stopped; stop all ranks."
                )
            sub.waiting.blocked_on(RankPublishing(is_silent=not current.is_alive))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    def _look(self) -> scripts.Heard:
        sub = self._subscriber
        while True:
            call = scripts.hear(
                sub.keys, sub.name, owner=sub.owner, call=self._call, place=self._place, rank=sub.seat.rank
            )
            if (found := self._ask(call)) is not None:
                return found
            sub.ownership.refollow()

    def _ask(self, call: scripts.Call[T]) -> T:
        """Run a call; report a key of the wrong type as ProtocolError."""
        try:
            return self._subscriber.control.call(call)
        except ResponseError as exc:
            raise in_words(exc) or exc from exc


#: Workers send a heartbeat every 0.5 s; workers silent for longer than this are skipped.
READY_S = 2.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a transfer."""

    transport: str
    #: Recipients.
    workers: tuple[str, ...]
    #: Why it failed; '' on success.
    failure: str
    #: Seconds of waiting for workers, and of sending.
    wait_s: float
    send_s: float


class Publisher:
    """Send a trainer's weights to the engines. All ranks have one; rank 0 leads."""

    def __init__(self, config: Config, subscriber: Subscriber) -> None:
        self.config = config
        self._subscriber = subscriber
        self._keys = subscriber.keys
        self._control = subscriber.control
        self._waiting = subscriber.waiting
        self._orders = Orders(subscriber, config.trainer.rank_timeout_s)
        self._model = config.model.name
        #: Result of the last transfer.
        self.last: Sent | None = None
        #: Sender of the transport; None: engines load the folder.
        self.sender: Sender | None = None
        #: Writer of the delta store; None with another transport.
        self.deltas = deltas_of(
            config, lambda: self.in_use(self._control), lambda cause: self._waiting.blocked_on(cause)
        )
        if (sender := sender_of(self.transport)) is not None:
            sender.set_up()
            self.sender = sender(config.trainer)

    @property
    def transport(self) -> str:
        return self.config.trainer.transport

    @property
    def needs_folder(self) -> bool:
        """Return whether a version needs its folder before it is sent or stored as a delta."""
        return self.deltas is not None or (self.sender is not None and self.sender.needs_folder)

    def leave_copies(self) -> None:
        """Wait until the sender no longer reads the copies, whose memory is about to be reused. Errors propagate."""
        if self.sender is not None:
            self.sender.leave_copies()

    def close(self) -> None:
        """Close the transport. Errors are logged and ignored."""
        if self.sender is not None:
            _quietly(self.sender.close)

    def follow(self, source: Source) -> int:
        """Take part in the walks of rank 0, on another rank, until it is done; return the version.

        Blocks for rank 0. Raises PublishError with rank 0's reason, and as ``Orders.hear``.
        """
        if not source.is_sharded:
            return 0
        config = publish.require_config(Path(self.config.model.path))
        self._orders.begin()
        while True:
            order = self._orders.hear()
            if order.kind == "done":
                return order.version
            if order.kind == "failed":
                raise PublishError(f"Rank 0 could not publish: {order.reason}")
            for _ in source.tensors(config):
                pass

    def _leads(self, source: Source) -> bool:
        """Return whether other ranks hold parts of these weights."""
        return source.is_sharded and self._subscriber.seat.ranks > 1

    def begin(self, source: Source) -> None:
        """Begin a publication on rank 0."""
        if self._leads(source):
            self._orders.begin()

    def walk(self, source: Source) -> None:
        """Make the other ranks begin a walk, on rank 0. Blocks until all do. Raises WaitTimeout, OwnershipLost."""
        if self._leads(source):
            self._orders.give(Order("walk"))

    def done(self, source: Source, version: int) -> None:
        """Release the other ranks, on rank 0, after success. Blocks for one round trip."""
        if self._leads(source):
            self._orders.end(Order("done", version))

    def failed(self, source: Source, exc: BaseException) -> None:
        """Release the other ranks, on rank 0, after a failure."""
        if self._leads(source):
            self._orders.fail(str(exc) or repr(exc))

    def write(self, source: Source, into: Path, version: int, claim: Callable[[int], None]) -> Written:
        """Write and verify a version; raise PublishError. Blocks for gathering and the disk, also for space on it.

        Args:
            claim: claims its number once the folder is complete.
        """
        trainer, is_ours = self.config.trainer, threading.Event()

        def claim_once() -> None:
            if not is_ours.is_set():
                claim(version)
                is_ours.set()

        def once() -> Written:
            self.walk(source)
            return publish.write_weights(
                source,
                self.config.model.path,
                into,
                version,
                keep=trainer.keep_versions,
                in_use=lambda: self.in_use(self._control),
                claim=claim_once,
                max_bucket_bytes=trainer.bucket_bytes,
            )

        return until_room(once, blocked_on=self._waiting.blocked_on)

    def store_deltas(
        self, written: Written, version: int, announced: Callable[[], Publication | None], abandoned: list[list[int]]
    ) -> None:
        """Put a written version into the delta store, if the run has one; raise PublishError.

        Blocks for disk, processor and store, also for space on it.
        """
        if (deltas := self.deltas) is not None:
            before = announced()
            until_room(lambda: deltas.put(written, version, before, abandoned), blocked_on=self._waiting.blocked_on)

    def in_use(self, control: Control) -> Collection[int]:
        """Return versions that engines hold, load or are about to load, or that are pinned.

        Args:
            control: connection of the calling thread.
        """
        pins = control.do(lambda client: client.hvals(self._keys.pins(self._model)))
        held = {worker.version for worker in self._all_workers(control)}
        return {int(pin) for pin in pins} | held | self._wanted(control)

    def _wanted(self, control: Control) -> set[int]:
        """Return versions that workers have announced they load, or may go back to."""
        raw = control.do(lambda client: client.hgetall(self._keys.loading(self._model)))
        alive = {worker.name for worker in self._all_workers(control)}
        found: set[int] = set()
        for name, data in raw.items():
            worker, at, versions = loading_of(name, data)
            # A new worker announces this before its presence.
            if worker in alive or time.time() - at < FRESH_S:
                found.update(versions)
        return found

    def open(self, publication: Publication, copy: Copy | None = None) -> None:
        """Open the enrollment for a version that is about to be announced.

        Args:
            copy: source of the weights; None: the folder exists.

        Raises PublishError if another trainer has the subscription, whose transfers must not be disturbed.
        """
        if self.sender is not None:
            sub = self._subscriber
            call = transfers.open_(sub.keys, sub.name, self._model, publication.id, owner=sub.owner, gen=sub.gen)
            if not self._control.call(call):
                raise PublishError(
                    f"Version {publication.version} of model {self._model!r} cannot be announced: another trainer has "
                    f"subscription {sub.name!r} by now, or it was rewound."
                )
            if copy is None:
                self.sender.begin(publication)
            else:
                self.sender.begin_copy(publication, copy)

    def send(self, source: Source, publication: Publication, after: int = 0) -> Sent | None:
        """Send an announced version to the ready workers; failures are logged, and those workers load the folder.

        Blocks; each wait at most ``trainer.transfer_timeout_s``.

        Args:
            after: wait only for workers that have this version or wait for its folder, and can thus receive at once;
                0: for all that serve.
        """
        if self.sender is None:
            return None
        began = time.monotonic()
        transfer = Transfer(
            publication,
            self.config.trainer,
            lambda: self._walk(source),
            keys=self._keys,
            control=self._control,
            waiting=self._waiting,
        )
        transfer.await_workers(lambda: self._ready(after, publication) if after else self._expected(publication))
        waited, failure = time.monotonic(), ""
        if transfer.workers:
            failure = deliver(self.sender, transfer)
        transfer.close(failure)
        ended = time.monotonic()
        self.last = Sent(self.transport, tuple(transfer.workers), failure, waited - began, ended - waited)
        return self.last

    def _walk(self, source: Source) -> Iterator[Bucket]:
        """Iterate over the weights once more; other ranks of a sharded source take part until its end."""
        self.walk(source)
        return buckets(source, publish.require_config(Path(self.config.model.path)), self.config.trainer.bucket_bytes)

    def _all_workers(self, control: Control) -> list[WorkerPresence]:
        """Return all workers. Raises ProtocolError if a record is invalid: that worker may hold any version."""
        return control.do(lambda client: live_workers(client, self._keys, all_=True))

    def _expected(self, new: Publication) -> set[str]:
        """Return the workers that will be ready soon: serving, able to receive weights, with an older version."""
        workers = self._control.do(lambda client: live_workers(client, self._keys))
        return {
            one.name for one in workers if one.state == WorkerState.SERVING and one.ranks and one.version < new.version
        }

    def _ready(self, version: int, new: Publication) -> set[str]:
        """Return workers that can receive now: they know the layout, and have ``version`` or wait for its folder.

        They need not drain first. A worker that waits for a folder receives the next version; otherwise it would stay
        behind while the disk is slower than a step.
        """
        config = self.config
        if config.data.eval_pinned and self._control.do(lambda client: client.zcard(self._keys.unfinished(Lane.EVAL))):
            return set()
        drains = config.staleness.rules.drains or config.worker.apply == "drain"
        if config.staleness.rules.drains:
            cohorts = self._control.do(lambda client: client.hkeys(self._keys.cohorts))
            if any(one < new.version for one in cohorts_in(cohorts)):
                return set()  # no worker loads before the cohort has ended (T5)
        workers = self._control.do(lambda client: live_workers(client, self._keys))
        return {
            one.name
            for one in workers
            if one.state == WorkerState.SERVING
            and one.ranks
            and one.layout == new.layout
            and version in (one.version, one.awaits)
            and one.age_s <= READY_S
            and not (drains and one.running)
        }


def deliver(sender: Sender, transfer: Transfer) -> str:
    """Send the weights; return '' or the error, after which workers load the folder.

    Raises:
        QueueUnavailable, QueueFull, Fenced: workers cannot be notified.
    """
    try:
        sender.send(transfer)
    except TransferFailed as exc:
        failure = str(exc)
    except (QueueUnavailable, QueueFull, Fenced):
        _quietly(sender.abandon)
        raise
    except Exception as exc:  # out of device memory, or any error of a user's sender
        failure = f"the weights could not be sent ({exc!r})"
        log.debug("a sender raised", exc_info=True)
    else:
        return ""
    log.warning("transfer of version %d failed, workers load its folder: %s", transfer.publication.version, failure)
    _quietly(sender.abandon)
    return failure


def _quietly(end: Callable[[], None]) -> None:
    """Call a sender's cleanup; log and ignore its errors, as it may be a user's, or its device may be lost."""
    try:
        end()
    except Exception as exc:
        log.warning("failed to clean up a transfer of weights: %s", format_exc(exc))
        log.debug("a sender raised", exc_info=True)
