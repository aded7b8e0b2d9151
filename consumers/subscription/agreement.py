"""Exchange words among ranks before a common step, outside any collective (T14).

A rank that never comes is named by a wait and by an error; ranks that disagree stop all. A rank that reports a wait for
a disk is waited for without a limit: a full disk must not end a run.
"""

import time
from dataclasses import dataclass, replace

from penstock.consumers.subscription.rank import Seat
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import ProtocolError, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.waits import Waiting, read_waits
from penstock.records.causes import FileUnwritable, RanksAbsent
from penstock.records.worker_causes import RoomOnDisk, WeightsUnwritten

#: Seconds between two reads of the others' words; doubles.
LOOK_S, LONGEST_LOOK_S = 0.001, 0.02
#: Seconds between two checks of the ownership.
CHECK_S = 0.5
#: Words expire after so long; large enough for a clock that is set ahead by a day.
TTL_S = 7 * 86400
#: Causes for which a rank may wait without a limit.
LASTING = (RoomOnDisk, FileUnwritable, WeightsUnwritten)


@dataclass(frozen=True, slots=True)
class Circle:
    """A group of ranks 0 to ``size`` - 1 under one name."""

    name: str
    rank: int
    size: int
    seat: Seat
    #: Rank within the role of number 0 here, for waits and errors.
    first: int = 0

    def name_of(self, rank: int) -> str:
        return self.seat.name_of(self.first + rank)

    def held_up(self, subscriber: Subscriber) -> dict[int, str]:
        """Return the ranks that wait for a disk, with the name of the cause. Blocks for two round trips."""
        found = subscriber.control.do(lambda client: read_waits(client, subscriber.keys))
        waits = {one.who: one.cause.name for one in found if isinstance(one.cause, LASTING)}
        names = {rank: self._seat_of(rank).who(subscriber.name) for rank in range(self.size)}
        return {rank: waits[name] for rank, name in names.items() if name in waits}

    def _seat_of(self, rank: int) -> Seat:
        dp_rank, replica = divmod(self.first + rank, self.seat.num_replicas)
        return replace(self.seat, dp_rank=dp_rank, replica=replica)


def meet(
    subscriber: Subscriber,
    waiting: Waiting,
    circle: Circle,
    number: int,
    word: str,
    absence: RanksAbsent,
    timeout_s: float,
) -> list[str]:
    """Publish ``word`` in round ``number``; block until every rank has, and report absent ones. Return words by rank.

    Rounds of a circle are consecutive, or follow a rewind. ``absence``: purpose of the meeting, without the ranks.

    Raises:
        WaitTimeout: a rank is absent, without waiting for a disk; names it.
        OwnershipLost: the subscription was rewound or taken over.
    """
    call = scripts.agree(
        subscriber.keys,
        subscriber.name,
        owner=subscriber.owner,
        gen=(gen := subscriber.gen),
        number=number,
        role=circle.name,
        rank=circle.rank,
        ranks=circle.size,
        word="." + word,  # never empty: an empty word means that the rank has published none
        ttl_s=TTL_S,
    )
    now = time.monotonic()
    deadline, check_at, pause_s = now + timeout_s, now + CHECK_S, LOOK_S
    held: dict[int, str] = {}
    while True:
        said = subscriber.control.call(call)
        if said is None:
            subscriber.ownership.check_lineage(gen)
            said = [""] * circle.size
        if all(said):
            waiting.end()
            return [one[1:] for one in said]
        if (now := time.monotonic()) > min(check_at, deadline):
            subscriber.ownership.check_lineage(gen)
            held, check_at = circle.held_up(subscriber), now + CHECK_S
        absent = {rank: circle.name_of(rank) for rank, one in enumerate(said) if not one}
        blocked = {absent[rank]: name for rank, name in held.items() if rank in absent}
        cause = replace(absence, ranks=tuple(absent.values()), blocked=blocked)
        if held.keys() >= absent.keys():
            deadline = now + timeout_s
        elif now > deadline:
            came = circle.size - len(absent)
            raise WaitTimeout(
                f"Waited {timeout_s:g} s in vain for {cause.words()}: dead or stuck ({came} of {circle.size} ranks "
                "came); stop all ranks.",
                count=came,
                cause=cause,
            )
        waiting.blocked_on(cause)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)


def agree(
    subscriber: Subscriber, number: int, about: tuple[int, str, int] | None, word: str, timeout_s: float
) -> list[str]:
    """Check that all ranks of the role train the same batch; return the words of all ranks.

    Args:
        number: number of earlier calls on this rank.
        about: (batch, digest, step); None if this rank trains nothing, which is not compared.

    Raises:
        ProtocolError: two ranks are about to train different batches or steps.
        WaitTimeout, OwnershipLost: see ``meet``.
    """
    seat = subscriber.seat
    circle = Circle(seat.role, seat.rank, seat.ranks, seat)
    mine = " ".join(map(str, about)) if about is not None else ""
    absence = RanksAbsent((), "train", about[0], about[2]) if about is not None else RanksAbsent((), "end")
    said = [
        one.partition("|")
        for one in meet(subscriber, subscriber.waiting, circle, number, f"{mine}|{word}", absence, timeout_s)
    ]
    told = {rank: one for rank, (one, _, _) in enumerate(said) if one}
    if len(set(told.values())) > 1:
        told_words = "; ".join(f"{seat.name_of(rank)}: {_in_words(one)}" for rank, one in told.items())
        raise ProtocolError(
            f"The ranks of subscription {subscriber.name!r} are about to train different things ({told_words}): stop "
            "them all and restore one checkpoint."
        )
    return [word for _, _, word in said]


def _in_words(told: str) -> str:
    n, digest, step = told.split(" ")
    return f"batch {n} ({digest[:8]}), step {step}"
