"""Who holds the gate, and how full it is (T3).

How full is the arithmetic of ``places`` in ``lua/_common.lua``, which is what admits and refuses. Whoever tells why
it waits, or decides by it, asks here; a test holds the two to the same figures on random states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.config.staleness import Sampler, places
from penstock.config.subscription import Definition, account_of
from penstock.protocol.keys import Keys
from penstock.protocol.position import Position, read_count
from penstock.protocol.records.small_maps import count_of, name_in
from penstock.redis.commands import Client
from penstock.words import shown


@dataclass(frozen=True, slots=True)
class Holder:
    """What decides whether a subscription holds the gate."""

    #: Under what name groups count its uses; members of a pool have one.
    account: str
    #: It drives the clock, and is not parked: its trainer has not been gone for longer than its retention.
    drives: bool


def gates(subs: Mapping[str, Holder]) -> list[list[str]]:
    """Names of the subscriptions that hold the gate; with one of a pool all of its members, counted together."""
    accounts: dict[str, list[str]] = {}
    for name, sub in sorted(subs.items()):
        accounts.setdefault(sub.account, []).append(name)
    return [names for names in accounts.values() if any(subs[name].drives for name in names)]


def read_gates(client: Client, keys: Keys) -> tuple[int, list[list[str]]]:
    """(revision of subs, ``gates`` of those that are live). Blocks for two round trips.

    The revision is as old as the names or older, so a verb that is given both refuses what has changed since.

    Raises:
        ProtocolError: Redis does not hold them as penstock writes it.
    """
    raw = client.hgetall(keys.subs)
    names = [name_in(field[4:], "A subscription") for field in raw if field.startswith(b"sub:")]
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.hmget(keys.sub(name), "driving", "parked", "share")
    subs = {
        name: Holder(
            account_of(name, name_in(share or b"", f"The pool of subscription {shown(name)}")),
            driving == b"1" and parked != b"1",
        )
        for name, (driving, parked, share) in zip(names, pipe.execute(), strict=True)
    }
    return count_of(raw.get(b"rev"), "The revision of the subscriptions"), gates(subs)


@dataclass(frozen=True, slots=True)
class Counted:
    """What the gate counts of one subscription, in groups."""

    #: h, in versions; the tightest of a pool's members counts.
    bound: int = 0
    #: B: those that one of its versions consumes.
    group_budget: int = 0
    #: Admitted beyond the bound: ``over_sampling_groups``, and what is owed to a batch.
    extra: int = 0
    #: Those that a published version consumed, and that it gave up unused.
    consumed: int = 0
    disposed: int = 0
    #: Those that were gone before it came.
    start: int = 0
    #: Places in the order of admission that held nothing when their turn came.
    skipped: int = 0
    #: It cuts by cohorts: one that is buried or given up keeps its place until its cohort is trained or skipped.
    cohort: bool = False
    #: Its pool; '': none.
    share: str = ""
    #: Its versions consume nothing while its trainer is gone.
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Places at one gate, in groups."""

    #: Below 0: so many are taken too many.
    free: int
    places: int

    @property
    def taken(self) -> int:
        return self.places - self.free


def room(members: Sequence[Counted], *, admitted: int, gone: int = 0, pool_gone: int = 0) -> Room:
    """Places at the gate of the subscriptions that it counts together: one, or all members of a pool.

    Args:
        admitted: train groups that were ever admitted.
        gone: those of them that were buried or cancelled before they were complete.
        pool_gone: those that were gone before the pool's first member came, or that left with members.
    """
    in_pool = any(one.share and not one.cohort for one in members)
    stock = admitted - (pool_gone if in_pool else 0) - (0 if any(one.cohort for one in members) else gone)
    for one in members:
        stock -= one.consumed
        if one.cohort:
            stock -= one.skipped
        else:
            stock -= one.disposed + (0 if one.share else one.start)
    total = places(
        min((one.bound for one in members), default=0),
        sum(one.group_budget for one in members if not one.parked),
        sum(one.extra for one in members),
    )
    return Room(total - stock, total)


def read_rooms(client: Client, keys: Keys, gates: Sequence[Sequence[str]]) -> dict[str, Room]:
    """The room of each gate, by its first subscription. Blocks for a round trip; all is of one instant.

    Args:
        gates: names of the subscriptions that hold the gate, those of a pool together.

    Raises:
        ProtocolError: Redis does not hold one of them as penstock writes it.
    """
    pipe = client.pipeline(transaction=True)
    pipe.hmget(keys.counters, "seq:train", "buried:train", "cancelled:train")
    pipe.hgetall(keys.subs)
    names = [name for members in gates for name in members]
    for name in names:
        pipe.hgetall(keys.sub(name))
    (admitted, *gone), subs, *found = pipe.execute()
    counted = {name: _counted(raw, name) for name, raw in zip(names, found, strict=True)}
    return {
        members[0]: room(
            [counted[name] for name in members],
            admitted=count_of(admitted, "The number of jobs admitted"),
            gone=sum(count_of(many, "The number of jobs buried or cancelled") for many in gone),
            pool_gone=_pool_gone(subs, counted[members[0]].share),
        )
        for members in gates
    }


def _counted(raw: Mapping[bytes, bytes], name: str) -> Counted:
    definition, position = Definition.read(raw, name), Position.read(raw, name)
    for key in ("bound", "over"):  # as the verb does, which counts nothing where one is empty
        read_count(raw.get(key.encode()), key, name)
    return Counted(
        bound=definition.bound,
        group_budget=position.gb,
        extra=definition.over + position.owed,
        consumed=position.p,
        disposed=position.disposed,
        start=position.start,
        skipped=position.skipped,
        cohort=definition.sampler is Sampler.COHORT,
        share=definition.share,
        parked=position.parked,
    )


def _pool_gone(subs: Mapping[bytes, bytes], pool: str) -> int:
    fields = (f"start:{pool}", f"gone:{pool}")
    return sum(count_of(subs.get(field.encode()), f"What {field} counts") for field in fields) if pool else 0
