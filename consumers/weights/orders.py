"""Orders of rank 0 to a trainer's other ranks while it publishes weights of which they hold parts.

    rank 0        give walk ─> all walk ─> disk, workers, Redis ─> ... ─> end done VERSION | failed WHY
    other ranks   hear ──────> all walk ─> hear ──────────────────> ... ─> hear

Orders come through Redis: who waits for one does so by name, for as long as rank 0 lives. A walk is the one collective,
and it begins when all are there: rank 0 may wait for a disk for hours, and no collective runs out of its time.
"""

import logging
import time
from typing import TypeVar

from redis.exceptions import ResponseError

from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import OwnershipLost, PublishError, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.records.causes import RankPublishing, RanksAbsent
from penstock.protocol.records.order import Order
from penstock.redis.refusals import in_words

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
