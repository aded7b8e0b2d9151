"""Keep a trainer's ranks together while rank 0 publishes weights of which the others hold parts.

    rank 0        lead ─> walk: signal ─> all walk ─> disk, workers, Redis ─> ... ─> finish VERSION | fail WHY
    other ranks   follow: wait ─────────> all walk ─> wait ────────────────> ... ─> version | PublishError

Orders go through Redis: waits for them are reported and last as long as rank 0 lives. The walk is the only collective
and begins once all ranks are ready, so it does not time out while rank 0 waits for a disk.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from redis.exceptions import ResponseError
from torch import Tensor

from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights.sources import Source
from penstock.errors import OwnershipLost, PublishError, WaitTimeout
from penstock.protocol import scripts
from penstock.records.causes import RankPublishing, RanksAbsent
from penstock.records.publication import Order
from penstock.redis.refusals import in_words

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Polling interval for the other ranks, and theirs for rank 0.
POLL_S = 0.005


class RankBarrier:
    """Barrier of the ranks of one trainer during publications; every rank has one. Not thread-safe.

    On rank 0 it is the source of the weights, whose walks the other ranks join.

    Args:
        timeout_s: longest wait of rank 0 for other ranks, and of those for a rank 0 that does not renew its lease.
    """

    is_sharded = True

    def __init__(self, subscriber: Subscriber, timeout_s: float) -> None:
        self._subscriber, self._timeout_s = subscriber, timeout_s
        #: Publications of sharded weights so far, the same on every rank; completed orders of the current one.
        self._call = self._place = 0
        #: Rank 0: what it publishes, if the other ranks take part.
        self._source: Source | None = None

    def lead(self, source: Source) -> Source:
        """Begin a publication on rank 0; return the source to publish."""
        self._source = source if source.is_sharded and self._subscriber.seat.ranks > 1 else None
        if self._source is None:
            return source
        self._call, self._place = self._call + 1, 0
        return self

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Walk through the source, once all other ranks wait for an order and have received it; block until then.

        Raises WaitTimeout, which names the ranks that did not arrive; OwnershipLost; ProtocolError.
        """
        assert self._source is not None
        deadline = time.monotonic() + self._timeout_s
        self._until(self._place, None, deadline)
        self._until(self._place + 1, Order("walk"), deadline)
        self._subscriber.waiting.end()
        self._place += 1
        yield from self._source.tensors(config)

    def finish(self, version: int) -> None:
        """Release the other ranks with the published version. Blocks for a round trip. Raises ProtocolError."""
        if self._source is not None:
            self._ask(self._order(Order("done", version)))

    def fail(self, exc: BaseException) -> None:
        """Release the other ranks with an error, in one attempt: without Redis they see the lease expire."""
        try:
            if self._source is not None:
                failed = Order("failed", reason=str(exc) or repr(exc))
                scripts.run(self._subscriber.control.client, self._order(failed))
        except Exception as failure:  # why the publication failed is what matters
            log.warning("failed to notify the other ranks that the publication failed: %s", failure)

    def follow(self, source: Source, config: Mapping[str, Any]) -> int:
        """Take part in the walks of rank 0, on another rank, until it is done; return the version. Blocks for rank 0.

        Raises:
            OwnershipLost: another trainer has the subscription, or rank 0 renewed its lease for ``timeout_s`` no more.
            PublishError: rank 0 failed, or is at another publication.
            ProtocolError: malformed order in Redis.
        """
        self._call, self._place = self._call + 1, 0
        while (order := self._wait_for_order()).kind == "walk":
            for _ in source.tensors(config):
                pass
        if order.kind == "failed":
            raise PublishError(f"Rank 0 could not publish: {order.reason}")
        return order.version

    def _until(self, place: int, order: Order | None, deadline: float) -> None:
        """Write ``order`` until every rank waits for the order number ``place``."""
        seat = self._subscriber.seat
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
            self._subscriber.waiting.blocked_on(cause)
            time.sleep(POLL_S)

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

    def _wait_for_order(self) -> Order:
        sub, alive_s = self._subscriber, time.monotonic()
        while True:
            current = self._read()
            if current.order is not None:
                self._place += 1
                self._read()  # acknowledge: rank 0 continues when all ranks have
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
            time.sleep(POLL_S)

    def _read(self) -> scripts.Heard:
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
