"""Pools and spent lots against plain lists that do the same slowly."""

from hypothesis import given
from hypothesis import strategies as st

from buffer.group import Group
from buffer.samplers import CohortPool, Pool, make_pool
from buffer.spent import Spent
from buffer.subscription import Definition, Position, Subscription
from penstock.staleness import Lineage


def group(place: int, oldest: int = 1, **over: object) -> Group:
    values: dict[str, object] = {
        "job": f"d/0/{place}", "lane": "train", "seq": place, "completed": place, "n": 2, "oldest": oldest,
        "versions": (oldest,) if oldest >= 0 else (), "kept": 2,
    }  # fmt: skip
    return Group(**(values | over))  # type: ignore[arg-type]


#: (place, oldest version, added or discarded)
MOVES = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 4), st.booleans()), max_size=40)


@given(MOVES, st.booleans(), st.integers(0, 12), st.integers(0, 5))
def test_pools_take_in_their_order_whatever_came_and_went(
    moves: list[tuple[int, int, bool]], by_version: bool, count: int, floor: int
) -> None:
    pool = Pool(by_version)
    there: list[Group] = []
    for place, oldest, comes in moves:
        known = next((one for one in there if one.seq == place), None)
        if comes and known is None:
            there.append(group(place, oldest))
            pool.add(there[-1])
        elif comes and known is not None:
            pool.add(known)  # twice changes nothing
        elif known is not None:
            there.remove(known)
            pool.discard(known)
    wanted = sorted(there, key=lambda one: one.oldest) if by_version else there
    assert len(pool) == len(there)
    assert list(pool) == wanted
    assert pool.first(count) == wanted[:count]
    assert pool.oldest(count) == sorted(wanted, key=lambda one: one.oldest)[:count]
    assert {one.job for one in pool.below(floor)} == {one.job for one in there if 0 <= one.oldest < floor}
    assert sum(pool.versions.values()) == len(there)
    assert all(pool.versions[one.oldest] for one in there)


def test_a_cohort_is_looked_up_by_place_and_may_have_holes() -> None:
    pool = make_pool("cohort")
    assert isinstance(pool, CohortPool)
    for place in (4, 1, 7):
        pool.add(group(place))
    assert [one.seq for one in pool.places(1, 4)] == [1, 4]
    assert (pool.next_place(2), pool.next_place(8)) == (4, None)
    pool.discard(group(4))
    assert [one.seq for one in pool.places(1, 4)] == [1, 4], "another group of that place is not this one"
    pool.discard(pool.places(4, 4)[0])
    assert [one.seq for one in pool.places(1, 4)] == [1]


def test_T1_abandoned_groups_are_found_once_when_they_come_and_when_a_rewind_does() -> None:
    sub = Subscription(Definition("actor", size=2), Position())
    old, new = group(1, 3), group(2, 3)
    sub.place(old)
    assert sub.abandoned() == []
    sub.position.lineage = Lineage(((3, 3),))
    assert sub.abandoned() == [old]
    assert sub.abandoned() == [], "looked at already"
    sub.place(new)
    sub.place(group(3, 4))
    assert sub.abandoned() == [new]
    sub.position.lineage = Lineage(((3, 3),), frozenset({5}))
    assert sub.abandoned() == [], "a repeat abandons nothing"


@given(
    batches=st.lists(st.dictionaries(st.sampled_from(["actor", "critic"]), st.integers(1, 4)), max_size=20),
    ckpt=st.fixed_dictionaries({"actor": st.integers(0, 4), "critic": st.integers(0, 4)}),
)
def test_I4_spent_groups_are_durable_when_every_checkpoint_is_past_them(
    batches: list[dict[str, int]], ckpt: dict[str, int]
) -> None:
    spent = Spent()
    groups = [group(i, batches=held) for i, held in enumerate(batches)]
    for one in groups:
        spent.add(one)
        spent.add(one)
    assert len(spent) == len(groups)
    durable = {one.job for one in groups if all(n <= ckpt[sub] for sub, n in one.batches.items())}
    assert {one.job for one in spent.durable(ckpt)} == durable
    assert {one.job for one in spent.expired(ckpt, -1.0)} == {one.job for one in groups} - durable
    assert spent.expired(ckpt, 3600.0) == []
    for one in groups:
        spent.discard(one)
    assert (len(spent), spent.durable(ckpt)) == (0, [])


def test_spent_groups_follow_their_last_batch() -> None:
    spent = Spent()
    one = group(1, batches={"actor": 1})
    spent.add(one)
    one.batches["actor"] = 3
    spent.add(one)
    assert spent.durable({"actor": 2}) == []
    assert spent.durable({"actor": 3}) == [one]
    assert spent.durable({}) == [one], "a subscription that was dropped holds nothing back"
