"""Staleness as one object: versions that age, the version a batch is trained at, and what is due before a cut."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import StalenessConfig, TrainerConfig
from penstock.config.staleness import places
from penstock.errors import ConfigError
from penstock.protocol.staleness import UNBOUNDED, Lineage, Policy, remaining_batches, train_version

VERSIONS = st.integers(1, 12)


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    """Ranges may overlap, as those of a rewind that goes further back than the one before it do."""
    spans = draw(st.lists(st.tuples(VERSIONS, VERSIONS).map(lambda pair: (min(pair), max(pair))), max_size=3))
    return Lineage(tuple(spans), frozenset(draw(st.sets(VERSIONS, max_size=3))))


def ages(lineage: Lineage, version: int) -> bool:
    """By definition: not abandoned, and not a repeat."""
    abandoned = {v for first, last in lineage.abandoned for v in range(first, last + 1)}
    return version not in abandoned | lineage.repeats


@given(lineages(), st.integers(0, 12), st.integers(1, 12))
def test_T2_lag_counts_the_versions_between_that_changed_the_weights(lineage: Lineage, drawn: int, at: int) -> None:
    assert lineage.lag(drawn, at) == sum(ages(lineage, v) for v in range(drawn + 1, at + 1))
    assert lineage.lag(-1, at) == 0, "nothing was drawn"


@given(lineages(), st.integers(1, 12), st.integers(0, 5))
def test_T4_floor_is_the_oldest_version_within_the_bound(lineage: Lineage, at: int, bound: int) -> None:
    within = [v for v in range(at + 1) if lineage.lag(v, at) <= bound]
    assert lineage.floor(at, bound) == min(within)


@given(lineages(), st.integers(0, 12), st.integers(1, 12))
def test_T1_uncounted_ranges_are_disjoint_and_say_what_ages_nothing(lineage: Lineage, drawn: int, at: int) -> None:
    ranges = lineage.uncounted(drawn, at)
    inside = [v for first, last in ranges for v in range(first, last + 1)]
    assert inside == [v for v in range(drawn + 1, at + 1) if not ages(lineage, v)]
    assert max(0, at - drawn) - len(inside) == lineage.lag(drawn, at)


def test_T1_lineage_reads_what_redis_holds() -> None:
    lineage = Lineage.parse("3-5,9-9", "6,10")
    assert [v for v in range(1, 12) if not lineage.lives(v)] == [3, 4, 5, 9]
    assert [v for v in range(1, 12) if not lineage.ages(v)] == [3, 4, 5, 6, 9, 10]
    assert Lineage.parse("", "") == Lineage()


@given(per_version=st.integers(1, 4), restored=st.integers(0, 9), ahead=st.integers(0, 4), steps=st.integers(1, 12))
def test_T2_train_version_is_what_a_trainer_holds_that_publishes_in_phase(
    per_version: int, restored: int, ahead: int, steps: int
) -> None:
    """Played: restored behind any batch, publishing after every multiple, batches cut up to ``ahead`` early."""
    clock, through = 5, restored
    held = {}
    cut = {}
    for n in range(restored + 1, restored + steps + 1):
        for early in range(n, n + ahead + 1):
            cut.setdefault(early, train_version(clock, early, through, per_version))
        held[n] = clock
        if n % per_version == 0:
            clock, through = clock + 1, n
    assert {n: cut[n] for n in held} == held


@given(n=st.integers(1, 40), per_version=st.integers(1, 6))
def test_T4_remaining_batches_are_those_of_the_same_version(n: int, per_version: int) -> None:
    at = [train_version(1, m, 0, per_version) for m in range(1, n + per_version + 1)]
    assert remaining_batches(n, per_version) == at[n:].count(at[n - 1])


def in_time(lineage: Lineage, at: int, bound: int, budget: int, remaining: int, left: Counter[int]) -> bool:
    """Brute force: train what is left, oldest first, ``remaining`` at once and ``budget`` per later version."""
    slots = remaining
    lag_by_then = 0
    for version in sorted(left.elements()):
        while not slots:
            lag_by_then += 1
            slots = budget
            if lag_by_then > 50:
                return False
        if lineage.lag(version, at) + lag_by_then > bound:
            return False
        slots -= 1
    return True


@given(data=st.data(), lineage=lineages(), at=st.integers(1, 12), bound=st.integers(0, 4))
def test_T4_overdue_is_what_no_order_of_training_can_save(
    data: st.DataObject, lineage: Lineage, at: int, bound: int
) -> None:
    floor = lineage.floor(at, bound)
    living = [v for v in range(floor, at) if lineage.lives(v)]
    groups = data.draw(st.lists(st.sampled_from(living), max_size=20)) if living else []
    batch = groups[: data.draw(st.integers(0, len(groups)))]
    budget, remaining = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    policy = Policy("async", bound, "wait", "oldest_version")
    late = policy.overdue(
        lineage=lineage, train_version=at, group_budget=budget, remaining=remaining,
        untrained=Counter(groups), in_batch=Counter(batch),
    )  # fmt: skip
    left = Counter(groups) - Counter(batch)
    assert (not late) == in_time(lineage, at, bound, budget, remaining, left)
    for version, many in late:
        fewer = Counter(sorted(left.elements())[many:])
        at_least = [v for v in left.elements() if v <= version]
        assert 0 < many <= len(at_least)
        again = policy.overdue(
            lineage=lineage, train_version=at, group_budget=budget, remaining=remaining,
            untrained=fewer, in_batch={},
        )  # fmt: skip
        assert version not in dict(again), "without that many of the oldest the version is in time"


def test_T5_modes_have_their_bound_sampler_and_expiry() -> None:
    def policy(mode: str, **over: object) -> Policy:
        return Policy.of(StalenessConfig.model_validate({"mode": mode, **over}))

    assert policy("sync") == Policy("sync", 0, "wait", "cohort")
    assert policy("one_step") == Policy("one_step", 1, "wait", "cohort")
    assert policy("async", bound=3) == Policy("async", 3, "mask", "oldest_version")
    assert policy("async", on_expiry="drop").on_expiry == "drop"
    fifo = TrainerConfig.model_validate({"subscription": {"sampler": "fifo"}})
    with pytest.raises(ConfigError, match="mode one_step trains complete cohorts, but sampler is fifo"):
        policy("one_step").definition(fifo, model="policy")
    for bound in (0, 1, 9):
        trainer = TrainerConfig.model_validate({"subscription": {"bound": bound}})
        assert policy("async").definition(trainer, model="policy").bound == bound
    with pytest.raises(ConfigError, match="mode sync requires bound 0 for a driving subscription, but bound is 9"):
        policy("sync").definition(trainer, model="policy")
    beside = TrainerConfig.model_validate({"subscription": {"bound": 9, "sampler": "fifo", "driving": False}})
    assert policy("one_step").definition(beside, model="policy").bound == 9, "a mode is of who drives"


@pytest.mark.parametrize(
    ("on_expiry", "given_up", "mask_below", "oldest_allowed"),
    [
        ("wait", [(2, 2), (2, 3)], -1, 3),
        ("drop", [(2, 2), (2, 3)], -1, 3),
        ("mask", [(2, 2)], 3, -1),
    ],
)
def test_T4_at_the_bound_a_group_is_trained_and_below_it_goes_by_what_expiry_means(
    on_expiry: Any, given_up: list[tuple[int, int]], mask_below: int, oldest_allowed: int
) -> None:
    """Groups by their oldest and newest version; bound 2, version 5 is trained."""
    policy = Policy("async", 2, on_expiry, "fifo")
    floor = policy.floor(Lineage(), 5)
    assert floor == 3
    groups = [(2, 2), (2, 3), (3, 3), (3, 5), (-1, -1)]
    assert [one for one in groups if policy.gives_up(*one, floor)] == given_up
    assert (policy.mask_below(floor), policy.oldest_allowed(floor)) == (mask_below, oldest_allowed)


@pytest.mark.parametrize("on_expiry", ["wait", "mask", "drop"])
def test_who_is_not_bounded_waits_for_nothing_masks_nothing_and_gives_nothing_up(on_expiry: Any) -> None:
    policy = Policy("async", UNBOUNDED, on_expiry, "fifo")
    floor = policy.floor(Lineage(), 100)
    assert (floor, policy.waits, policy.masks) == (0, False, False)
    assert (policy.mask_below(floor), policy.oldest_allowed(floor)) == (-1, -1)
    assert not policy.gives_up(1, 1, floor)


def test_T3_gate_and_definition_count_groups_per_version() -> None:
    policy = Policy.of(StalenessConfig(mode="async", bound=2))
    trainer = TrainerConfig(batch_groups=8, batches_per_version=4)
    assert places(policy.bound, 32) == 96
    definition = policy.definition(trainer, model="policy")
    assert (definition.size, definition.per_version, definition.fields()["gb"]) == (8, 4, "32")
    larger = TrainerConfig.model_validate(
        {"batch_groups": 4, "min_groups_before_first_batch": 32, "subscription": {"size": 32, "bound": 0}}
    )
    assert policy.definition(larger, model="policy").fields()["gb"] == "32", "what counts is its own size"
