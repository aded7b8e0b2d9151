"""Pools and spent lots against plain lists that do the same slowly."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffer.decision import TooLarge, group_size, take
from penstock.buffer.group import Group, UsedUpGroups, priorities
from penstock.buffer.samplers import CohortPool, make_pool
from penstock.buffer.subscription import Subscription
from penstock.config.subscription import Definition
from penstock.protocol.position import Position
from penstock.protocol.staleness import Lineage
from tests.integration.play import meta


def group(place: int, oldest: int = 1, **over: object) -> Group:
    values: dict[str, object] = {
        "job": f"d/0/{place}", "lane": "train", "seq": place, "completed": place, "n": 2, "oldest": oldest,
        "versions": (oldest,) if oldest >= 0 else (), "kept": 2,
    }  # fmt: skip
    return Group(**(values | over))  # type: ignore[arg-type]


#: (place, oldest version, added or discarded)
MOVES = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 4), st.booleans()), max_size=40)


SAMPLERS = ["fifo", "oldest_version", "newest_version", "uniform", "prioritized", "difficulty"]
#: Share of right answers of the group at each place.
RIGHT = (0.0, 1.0, 0.5, 0.25, 1.0, 0.75, 0.5, 0.0, 1 / 3, 2 / 3)


@given(MOVES, st.sampled_from(SAMPLERS), st.integers(0, 12), st.integers(0, 5))
def test_pools_take_in_their_order_whatever_came_and_went(
    moves: list[tuple[int, int, bool]], sampler: str, count: int, floor: int
) -> None:
    pool = make_pool(sampler)
    there: list[Group] = []
    for place, oldest, comes in moves:
        known = next((one for one in there if one.seq == place), None)
        if comes and known is None:
            there.append(group(place, oldest, tokens=10 * place, right=RIGHT[place]))
            pool.add(there[-1])
        elif comes and known is not None:
            pool.add(known)  # twice changes nothing
        elif known is not None:
            there.remove(known)
            pool.discard(known)
    ordered = {
        "fifo": there,
        "oldest_version": sorted(there, key=lambda one: one.oldest),
        "newest_version": sorted(there, key=lambda one: -one.oldest),
        "difficulty": sorted(
            there,
            key=lambda one: (one.oldest > floor, one.oldest if one.oldest <= floor else round(abs(one.right - 0.5), 9)),
        ),
    }
    assert (len(pool), pool.samples, pool.tokens) == (len(there), 2 * len(there), sum(one.tokens for one in there))
    assert list(pool) == there
    taken = list(islice(pool.order(1, floor), count))
    if sampler in ordered:
        assert taken == ordered[sampler][:count]
    assert len({one.job for one in taken}) == min(count, len(there)), "each once, and from all of them"
    assert [one.job for one in islice(pool.order(1, floor), count)] == [one.job for one in taken], "the same again"
    assert list(pool.by_version()) == sorted(there, key=lambda one: one.oldest)
    assert {one.job for one in pool.below(floor)} == {one.job for one in there if 0 <= one.oldest < floor}
    assert pool.versions == Counter(one.oldest for one in there)


def firsts(sampler: str, draws: int, **over: Any) -> Counter[str]:
    """Which of four groups, with reward 0, 1, 2 and 4, come first in how many batches."""
    pool = make_pool(sampler, **over)
    for place, reward in enumerate((0.0, 1.0, 2.0, 4.0)):
        pool.add(group(place, priority={"reward": reward}))
    return Counter(next(pool.order(n)).job for n in range(draws))


def test_uniform_and_prioritized_draw_as_often_as_they_should() -> None:
    uniform = firsts("uniform", 4000)
    assert all(abs(count - 1000) < 150 for count in uniform.values())
    drawn = firsts("prioritized", 7000, priority="reward", exponent=1.0)
    assert drawn["d/0/0"] == 0, "a priority of 0 comes last"
    assert [round(drawn[f"d/0/{i}"] / 1000) for i in (1, 2, 3)] == [1, 2, 4]
    squared = firsts("prioritized", 2100, exponent=2.0)
    assert abs(squared["d/0/3"] - 1600) < 120
    flat = firsts("prioritized", 4000, exponent=0.0)
    assert all(abs(flat[f"d/0/{i}"] - 4000 / 3) < 200 for i in (1, 2, 3))


RECORDS = [
    replace(meta(0, "t"), reward=1.0, length=4, reward_info={"level": 3}),
    replace(meta(1, "t"), reward=3.0, length=8),
]


def test_priorities_are_means_over_the_group_of_numbers_in_its_metadata() -> None:
    found = priorities(RECORDS, ["reward", "length", "level", "reward_std", "nothing"])
    assert found == {"reward": 2.0, "length": 6.0, "level": 1.5, "reward_std": 1.0, "nothing": 0.0}


# --- sizes --------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=12)


@given(SIZES, st.sampled_from(["groups", "samples", "tokens"]), st.integers(1, 60), st.integers(1, 4))
def test_T10_a_batch_is_the_fewest_groups_that_hold_its_size_and_a_whole_multiple_of_samples(
    sizes: list[tuple[int, int]], unit: str, size: int, multiple: int
) -> None:
    groups = [group(i, n=n, tokens=tokens) for i, (n, tokens) in enumerate(sizes)]
    prefixes = [groups[:end] for end in range(1, len(groups) + 1)]
    whole = [prefix for prefix in prefixes if sum(one.n for one in prefix) % multiple == 0]
    enough = next((prefix for prefix in prefixes if sum(group_size(one, unit) for one in prefix) >= size), None)
    below = [prefix for prefix in whole if enough and len(prefix) <= len(enough)]
    above = [prefix for prefix in whole if enough and len(prefix) > len(enough)]
    expected = below[-1] if below else above[0] if above else []
    assert take(iter(groups), unit=unit, size=size, multiple=multiple) == expected


def test_a_batch_of_more_samples_than_a_manifest_holds_is_refused() -> None:
    groups = (group(i, n=2000, tokens=1) for i in range(1000))
    with pytest.raises(TooLarge):
        take(groups, unit="tokens", size=10**9)


# --- what a subscription takes ------------------------------------------------------------------------------------


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


def give_up(sub: Subscription, one: Group) -> None:
    one.uses[sub.account] = -1
    sub.place(one)


def test_T1_abandoned_groups_are_found_when_they_come_and_when_a_rewind_does_until_they_are_given_up() -> None:
    sub = Subscription("actor", Definition(size=2), Position())
    old, new = group(1, 3), group(2, 3)
    sub.place(old)
    assert sub.abandoned() == []
    sub.position.lineage = Lineage(((3, 3),))
    assert sub.abandoned() == [old]
    assert sub.abandoned() == [old], "not given up yet"
    give_up(sub, old)
    assert sub.abandoned() == []
    sub.place(new)
    sub.place(group(3, 4))
    assert sub.abandoned() == [new]
    give_up(sub, new)
    sub.position.lineage = Lineage(((3, 3),), frozenset({5}))
    assert sub.abandoned() == [], "a repeat abandons nothing"


@given(
    batches=st.lists(st.dictionaries(st.sampled_from(["actor", "critic"]), st.integers(1, 4)), max_size=20),
    ckpt=st.fixed_dictionaries({"actor": st.integers(0, 4), "critic": st.integers(0, 4)}),
)
def test_I4_spent_groups_are_durable_when_every_checkpoint_is_past_them(
    batches: list[dict[str, int]], ckpt: dict[str, int]
) -> None:
    spent = UsedUpGroups()
    groups = [group(i, batches=held) for i, held in enumerate(batches)]
    for one in groups:
        spent.add(one)
        spent.add(one)
    assert len(spent) == len(groups)
    durable = {one.job for one in groups if all(n <= ckpt[sub] for sub, n in one.batches.items())}
    assert {one.job for one in spent.durable(ckpt)} == durable
    both = {"actor", "critic"}
    assert {one.job for one in spent.overdue(ckpt, -1.0, both)} == {one.job for one in groups} - durable
    actors = {one.job for one in groups if one.batches.get("critic", 0) <= ckpt["critic"]} - durable
    assert {one.job for one in spent.overdue(ckpt, -1.0, {"actor"})} == actors, "what the critic needs stays"
    assert spent.overdue(ckpt, 3600.0, both) == []
    for one in groups:
        spent.discard(one)
    assert (len(spent), spent.durable(ckpt)) == (0, [])


def test_spent_groups_follow_their_last_batch() -> None:
    spent = UsedUpGroups()
    one = group(1, batches={"actor": 1})
    spent.add(one)
    one.batches["actor"] = 3
    spent.add(one)
    assert spent.durable({"actor": 2}) == []
    assert spent.durable({"actor": 3}) == [one]
    assert spent.durable({}) == [one], "a subscription that was dropped holds nothing back"
