"""Exchange messages among ranks before a common step, outside any collective (T14).

An absent rank is named in a wait and an error; ranks that disagree stop all ranks. A rank that reports a wait for a
disk is awaited without a limit, because a full disk must not end a run.
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

#: First and longest pause between reads of the other ranks' messages, in seconds; pauses double.
POLL_S, MAX_POLL_S = 0.001, 0.02
#: Seconds between checks of the ownership.
CHECK_S = 0.5
#: Time to live of messages in seconds; tolerates a clock set ahead by a day.
TTL_S = 7 * 86400
#: Causes of unlimited waits.
LASTING = (RoomOnDisk, FileUnwritable, WeightsUnwritten)


@dataclass(frozen=True, slots=True)
class Circle:
    """Describe a named group of ranks 0 to ``size`` - 1."""

    name: str
    rank: int
    size: int
    seat: Seat
    #: Rank within the role of rank 0 of this group, for waits and errors.
    first: int = 0

    def name_of(self, rank: int) -> str:
        return self.seat.name_of(self.first + rank)

    def waiting_for_disk(self, subscriber: Subscriber) -> dict[int, str]:
        """Return the ranks that are waiting for a disk, with the cause. Blocks for two round trips."""
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
    """Publish ``word`` in round ``number``, block until every rank has, and return the words by rank.

    Rounds of a group are consecutive, or follow a rewind. ``absence``: cause to report, without the absent ranks.

    Raises:
        WaitTimeout: a rank is absent without waiting for a disk; names the rank.
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
        word="." + word,  # never empty, because an empty word means that the rank has not published one
        ttl_s=TTL_S,
    )
    now = time.monotonic()
    deadline, check_at, pause_s = now + timeout_s, now + CHECK_S, POLL_S
    held: dict[int, str] = {}
    while True:
        words = subscriber.control.call(call)
        if words is None:
            subscriber.ownership.check_lineage(gen)
            words = [""] * circle.size
        if all(words):
            waiting.end()
            return [one[1:] for one in words]
        if (now := time.monotonic()) > min(check_at, deadline):
            subscriber.ownership.check_lineage(gen)
            held, check_at = circle.waiting_for_disk(subscriber), now + CHECK_S
        absent = {rank: circle.name_of(rank) for rank, one in enumerate(words) if not one}
        blocked = {absent[rank]: name for rank, name in held.items() if rank in absent}
        cause = replace(absence, ranks=tuple(absent.values()), blocked=blocked)
        if held.keys() >= absent.keys():
            deadline = now + timeout_s
        elif now > deadline:
            arrived = circle.size - len(absent)
            raise WaitTimeout(
                f"Timed out after {timeout_s:g} s waiting for {cause.words()}, dead or stuck ({arrived} of "
                f"{circle.size} ranks arrived): stop all ranks.",
                count=arrived,
                cause=cause,
            )
        waiting.blocked_on(cause)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_POLL_S)


def agree(
    subscriber: Subscriber, number: int, about: tuple[int, str, int] | None, word: str, timeout_s: float
) -> list[str]:
    """Check that all ranks of the role train the same batch; return their words.

    Args:
        number: number of earlier calls on this rank.
        about: (batch, digest, step); None skips the comparison for this rank.

    Raises:
        ProtocolError: two ranks are about to train different batches or steps.
        WaitTimeout, OwnershipLost: see ``meet``.
    """
    seat = subscriber.seat
    circle = Circle(seat.role, seat.rank, seat.ranks, seat)
    mine = " ".join(map(str, about)) if about is not None else ""
    absence = RanksAbsent((), "train", about[0], about[2]) if about is not None else RanksAbsent((), "end")
    words = [
        one.partition("|")
        for one in meet(subscriber, subscriber.waiting, circle, number, f"{mine}|{word}", absence, timeout_s)
    ]
    batches = {rank: one for rank, (one, _, _) in enumerate(words) if one}
    if len(set(batches.values())) > 1:
        described = "; ".join(f"{seat.name_of(rank)}: {_describe(one)}" for rank, one in batches.items())
        raise ProtocolError(
            f"The ranks of subscription {subscriber.name!r} are about to train different batches ({described}): stop "
            "all ranks and restore one checkpoint."
        )
    return [word for _, _, word in words]


def _describe(batches: str) -> str:
    n, digest, step = batches.split(" ")
    return f"batch {n} ({digest[:8]}), step {step}"
