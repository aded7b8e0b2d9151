"""Verbs by which the ranks of a trainer publish together: the orders of rank 0, and which ranks have arrived."""

from typing import Any, NamedTuple

from penstock.protocol.keys import Keys
from penstock.protocol.records.order import MAX_BYTES, Order
from penstock.redis.call import Call, Value, script, text

#: Time to live of the orders; a clock that is set ahead by a day must not delete them.
TTL_S = 7 * 86400


class Heard(NamedTuple):
    """What a rank reads of rank 0."""

    #: None if it is not given yet.
    order: Order | None
    #: Publication of rank 0's last order; 0: none.
    call: int
    #: Whether the owner's lease runs.
    is_alive: bool


def order(
    keys: Keys, sub: str, *, owner: str, gen: int, call: int, place: int, word: str, ranks: int
) -> Call[list[int] | None]:
    """Give order ``place`` of publication ``call``; return the place that each other rank waits for, -1: not arrived.

    None: the subscription is not the caller's.
    """

    def parse(answer: Any) -> list[int] | None:
        return [int(one) for one in answer[1:]] if text(answer[0]) == "ok" else None

    args: list[Value] = [keys.prefix, owner, gen, call, place, word, ranks, TTL_S]
    return Call(script("order"), [keys.sub(sub), keys.orders(sub)], args, parse)


def hear(keys: Keys, sub: str, *, owner: str, call: int, place: int, rank: int) -> Call[Heard | None]:
    """Wait for order ``place`` of publication ``call`` as ``rank``. None: another trainer has the subscription.

    Parsing the answer raises ProtocolError if it is not an order.
    """

    def parse(answer: Any) -> Heard | None:
        if text(answer[0]) != "ok":
            return None
        given = Order.from_text(answer[1], f"What rank 0 of subscription {sub!r} orders") if answer[1] else None
        return Heard(given, int(answer[2]), bool(answer[3]))

    args: list[Value] = [keys.prefix, owner, call, place, rank, TTL_S, MAX_BYTES + 1]
    return Call(script("hear"), [keys.sub(sub), keys.orders(sub), keys.owner(sub)], args, parse)
