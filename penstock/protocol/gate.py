"""Which subscriptions hold the gate, and how full it is (T3).

Computes the same figures as ``places`` in ``lua/admission.lua``, which admits and refuses; a test compares the two on
random states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.config.staleness import Sampler, places
from penstock.config.subscription import Definition, account_of
from penstock.protocol.position import Position, read_count
from penstock.records.codec import count_of, name_in
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import safe_repr


@dataclass(frozen=True, slots=True)
class Holder:
    """The fields that decide whether a subscription holds the gate."""

    #: Name by which groups count its uses; members of a pool share one.
    account: str
    #: It drives the clock and is not parked (its trainer has not been gone for longer than its retention).
    drives: bool


def gates(subs: Mapping[str, Holder]) -> list[list[str]]:
    """Return the subscriptions that hold the gate; members of a pool are grouped and counted together."""
    accounts: dict[str, list[str]] = {}
    for name, sub in sorted(subs.items()):
        accounts.setdefault(sub.account, []).append(name)
    return [names for names in accounts.values() if any(subs[name].drives for name in names)]


def read_gates(client: Client, keys: Keys) -> tuple[int, list[list[str]]]:
    """Return (revision of subs, ``gates`` of the live ones). Blocks for two round trips.

    The revision is at most as new as the names, so a verb given both refuses if something has changed since.

    Raises:
        ProtocolError: an entry is not what penstock writes.
    """
    raw = client.hgetall(keys.subs)
    names = [name_in(field[4:], "A subscription") for field in raw if field.startswith(b"sub:")]
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.hmget(keys.sub(name), "driving", "parked", "share")
    subs = {
        name: Holder(
            account_of(name, name_in(share or b"", f"The pool of subscription {safe_repr(name)}")),
            driving == b"1" and parked != b"1",
        )
        for name, (driving, parked, share) in zip(names, pipe.execute(), strict=True)
    }
    return count_of(raw.get(b"rev"), "The revision of the subscriptions"), gates(subs)


@dataclass(frozen=True, slots=True)
class Counted:
    """What the gate counts for one subscription, in groups."""

    #: h, in versions; the smallest in a pool counts.
    bound: int = 0
    #: B: groups that one of its versions consumes.
    group_budget: int = 0
    #: Admitted beyond the bound: ``over_sampling_groups``, and grants for a batch.
    extra: int = 0
    #: Groups that a published version consumed, and groups disposed of.
    consumed: int = 0
    disposed: int = 0
    #: Groups that were gone before it subscribed.
    start: int = 0
    #: Places in the order of admission that were empty when their turn came.
    skipped: int = 0
    #: It cuts by cohorts: a dead or disposed group keeps its place until its cohort is trained or skipped.
    cohort: bool = False
    #: Its pool; '': none.
    share: str = ""
    #: Its versions consume nothing while its trainer is gone.
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Places at one gate, in groups."""

    #: Negative: the number of places taken beyond the limit.
    free: int
    places: int

    @property
    def taken(self) -> int:
        return self.places - self.free


def room(members: Sequence[Counted], *, admitted: int, gone: int = 0, pool_gone: int = 0) -> Room:
    """Compute the places at the gate of subscriptions that are counted together: one, or all members of a pool.

    Args:
        admitted: train groups ever admitted.
        gone: groups of these that died or were cancelled before they were complete.
        pool_gone: groups that were gone before the pool's first member subscribed, or that left with members.
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
    """Return the room of each gate, by its first subscription. Blocks for a round trip; all of one instant.

    Args:
        gates: names of the subscriptions that hold the gate, members of a pool together.

    Raises:
        ProtocolError: an entry is not what penstock writes.
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
    for key in ("bound", "over"):  # must be numbers or empty, which counts as 0
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
