"""Write and verify the weights of ``Trainer.publish``, then send them to engines that are ready.

    all ranks    gather, for the folder or a copy ─────────────> gather again, where the folder came first (orders.py)
    rank 0       write, read back; or copy ─> open ─> announce ─> wait for workers ─> decide ─> send ─> done

Every step after the announcement may fail without harm: the folder is there, or comes behind (behind.py), and who
missed the transfer loads it.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
from penstock.consumers.weights.shared_memory import SharedMemory
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

# Orders of rank 0 to a trainer's other ranks while it publishes weights of which they hold parts.
#
#     rank 0        give walk ─> all walk ─> disk, workers, Redis ─> ... ─> end done VERSION | failed WHY
#     other ranks   hear ──────> all walk ─> hear ──────────────────> ... ─> hear
#
# Orders come through Redis: who waits for one does so by name, for as long as rank 0 lives. A walk is the one
# collective, and it begins when all are there: rank 0 may wait for a disk for hours, and no collective runs out of
# its time.

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Between two looks at what the others said; doubles.
LOOK_S, LONGEST_LOOK_S = 0.001, 0.01


class Orders:
    """One rank's end of them. Not thread-safe.

    Args:
        timeout_s: how long rank 0 waits for other ranks to come, and they for one that does not renew its lease.
    """

    def __init__(self, subscriber: Subscriber, timeout_s: float) -> None:
        self._subscriber = subscriber
        self._timeout_s = timeout_s
        #: Publications of sharded weights so far, on every rank the same; orders of this one that are over.
        self._call = self._place = 0

    def begin(self) -> None:
        """Orders of one publication, on every rank."""
        self._call, self._place = self._call + 1, 0

    def give(self, order: Order) -> None:
        """Give an order once all ranks wait for it; block until they have received it.

        Raises:
            WaitTimeout: a rank did not come; names it.
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
            log.warning("the other ranks are not told that nothing is published: %s", exc)

    def _until(self, place: int, order: Order | None, deadline: float) -> None:
        """Say ``order`` until every rank waits for the order of this place."""
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
            ProtocolError: what stands in Redis is no order.
        """
        sub, pause_s, alive_s = self._subscriber, LOOK_S, time.monotonic()
        while True:
            heard = self._look()
            if heard.order is not None:
                self._place += 1
                self._look()  # rank 0 goes on when all have heard it
                sub.waiting.end()
                return heard.order
            if heard.call > self._call:
                raise PublishError(
                    "Rank 0 is at another publication of weights than this rank: call publish equally often on every "
                    "rank, and stop all ranks where it failed on one."
                )
            now = time.monotonic()
            alive_s = now if heard.is_alive else alive_s
            if now - alive_s > self._timeout_s:
                raise OwnershipLost(
                    f"Rank 0 of subscription {sub.name!r}, whose weights are to be published, has not renewed its "
                    f"lease for {self._timeout_s:g} s: it is dead or stopped; stop all ranks."
                )
            sub.waiting.blocked_on(RankPublishing(is_silent=not heard.is_alive))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    def _look(self) -> scripts.Heard:
        sub = self._subscriber
        while True:
            call = scripts.hear(
                sub.keys, sub.name, owner=sub.owner, call=self._call, place=self._place, rank=sub.seat.rank
            )
            if (heard := self._ask(call)) is not None:
                return heard
            sub.ownership.refollow()

    def _ask(self, call: scripts.Call[T]) -> T:
        """Its answer; a key of another type, which is a mistake of who wrote it, is said in words."""
        try:
            return self._subscriber.control.call(call)
        except ResponseError as exc:
            raise in_words(exc) or exc from exc


#: A worker shows itself twice a second; one that was silent for longer is not waited for.
READY_S = 2.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a transfer."""

    transport: str
    #: Workers that were sent to.
    workers: tuple[str, ...]
    #: Why it failed; '' where it did not.
    failure: str
    #: Seconds of waiting for workers, and of sending.
    wait_s: float
    send_s: float


class Publisher:
    """The weights' way out of one trainer. All ranks have one; rank 0 leads."""

    def __init__(self, config: Config, subscriber: Subscriber) -> None:
        #: The run's; its sender was made with it.
        self.config = config
        self._subscriber = subscriber
        self._keys = subscriber.keys
        self._control = subscriber.control
        self._waiting = subscriber.waiting
        self._orders = Orders(subscriber, config.trainer.rank_timeout_s)
        self._model = config.model.name
        #: Of the last publication.
        self.last: Sent | None = None
        #: What weights are sent by; None: engines load the folder.
        self.sender: Sender | None = None
        #: What puts versions into the store of deltas; None: the transport is another.
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
        """Whether a version needs its folder before it is sent, or made deltas of."""
        return self.deltas is not None or (self.sender is not None and self.sender.needs_folder)

    @property
    def memories(self) -> Sequence[SharedMemory]:
        """Return the memory for copies; (): memory of the trainer alone."""
        return self.sender.memories if self.sender is not None else ()

    def leave_copies(self) -> None:
        """Have the sender leave copies, whose memory is about to be taken. Blocks; raises what the sender does."""
        if self.sender is not None:
            self.sender.leave_copies()

    def close(self) -> None:
        """Close the transport. Errors are logged and ignored."""
        if self.sender is not None:
            _quietly(self.sender.close)

    def follow(self, source: Source) -> int:
        """Rank other than 0: walk with rank 0 until it says that it is done; returns the version.

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
        """Whether other ranks hold parts of these weights."""
        return source.is_sharded and self._subscriber.seat.ranks > 1

    def begin(self, source: Source) -> None:
        """Rank 0: a publication begins, on every rank."""
        if self._leads(source):
            self._orders.begin()

    def walk(self, source: Source) -> None:
        """Rank 0: have the others walk through their parts; blocks until all do. Raises WaitTimeout, OwnershipLost."""
        if self._leads(source):
            self._orders.give(Order("walk"))

    def done(self, source: Source, version: int) -> None:
        """Rank 0: the others may go on. Blocks for one round trip."""
        if self._leads(source):
            self._orders.end(Order("done", version))

    def failed(self, source: Source, exc: BaseException) -> None:
        """Abort on rank 0, so that no other rank waits for it."""
        if self._leads(source):
            self._orders.fail(str(exc) or repr(exc))

    def write(self, source: Source, into: Path, version: int, claim: Callable[[int], None]) -> Written:
        """Write and prove a version; raises PublishError. Blocks for gathering and disk, for room on it too.

        Args:
            claim: claims its number, once the folder is whole.
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
        """Put a written version into the store of deltas, where there is one; raises PublishError.

        Blocks for disk, processor and store, for room on it too.
        """
        if (deltas := self.deltas) is not None:
            before = announced()
            until_room(lambda: deltas.put(written, version, before, abandoned), blocked_on=self._waiting.blocked_on)

    def in_use(self, control: Control) -> Collection[int]:
        """Return versions that engines hold, load or are about to load, or that are pinned.

        Args:
            control: of the thread that asks.
        """
        pins = control.do(lambda client: client.hvals(self._keys.pins(self._model)))
        held = {worker.version for worker in self._all_workers(control)}
        return {int(pin) for pin in pins} | held | self._wanted(control)

    def _wanted(self, control: Control) -> set[int]:
        """Versions that workers have said they load, or would go back to."""
        raw = control.do(lambda client: client.hgetall(self._keys.loading(self._model)))
        there = {worker.name for worker in self._all_workers(control)}
        found: set[int] = set()
        for name, data in raw.items():
            worker, at, versions = loading_of(name, data)
            # Said before its presence is: who has only just come counts too.
            if worker in there or time.time() - at < FRESH_S:
                found.update(versions)
        return found

    def open(self, publication: Publication, copy: Copy | None = None) -> None:
        """Let workers enroll for a version that is about to be announced: they hear of it only then.

        Args:
            copy: what it is sent from; None: its folder is there.

        Raises PublishError where another trainer has the subscription: what that one sends is not disturbed.
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
        """Send an announced version to the workers that are ready; whatever fails is logged and goes by disk.

        Blocks; each of its waits for at most ``trainer.transfer_timeout_s``.

        Args:
            after: wait for nobody but workers that can take it at once, as they have this version, or wait for its
                folder; 0: for all that serve.
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
        """Return the workers that will be ready soon: their engines serve, can take weights this way, and lack them.

        An engine that has the weights of ``new`` already takes its number without a transfer.
        """
        workers = self._control.do(lambda client: live_workers(client, self._keys))
        return {
            one.name for one in workers if one.state == WorkerState.SERVING and one.ranks and one.version < new.version
        }

    def _ready(self, version: int, new: Publication) -> set[str]:
        """Workers that can take new weights now: they know their layout, and have ``version`` or wait for its folder.

        Nothing has to end before. One that is behind takes what is sent next, or it would be behind for as long as
        the disk is slower than a step.
        """
        config = self.config
        if config.data.eval_pinned and self._control.do(lambda client: client.zcard(self._keys.unfinished(Lane.EVAL))):
            return set()
        drains = config.staleness.rules.drains or config.worker.apply == "drain"
        if config.staleness.rules.drains:
            cohorts = self._control.do(lambda client: client.hkeys(self._keys.cohorts))
            if any(one < new.version for one in cohorts_in(cohorts)):
                return set()  # whoever draws it, nobody loads before it has ended (T5)
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
    """Have the weights sent; why that was in vain, or ''. Whatever it raises, workers can load the folder.

    Raises:
        QueueUnavailable, QueueFull, Fenced: nobody can be told.
    """
    try:
        sender.send(transfer)
    except TransferFailed as exc:
        failure = str(exc)
    except (QueueUnavailable, QueueFull, Fenced):
        _quietly(sender.abandon)
        raise
    except Exception as exc:  # the device is out of memory, say, or it is a user's own
        failure = f"the weights could not be sent ({exc!r})"
        log.debug("a sender raised", exc_info=True)
    else:
        return ""
    log.warning("version %d goes by disk: %s", transfer.publication.version, failure)
    _quietly(sender.abandon)
    return failure


def _quietly(end: Callable[[], None]) -> None:
    """Have a sender drop what it holds. It may be a user's own, on a device that is gone; others still wait for us."""
    try:
        end()
    except Exception as exc:
        log.warning("what is left of a transfer of weights could not be dropped: %s", format_exc(exc))
        log.debug("a sender raised", exc_info=True)
