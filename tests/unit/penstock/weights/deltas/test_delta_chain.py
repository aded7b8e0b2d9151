"""Chains to a version, and what of them may be deleted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PublishError
from penstock.weights import delta_store
from penstock.weights.delta_store import (
    LONGEST,
    MAX_CHAINS,
    Anchor,
    Catalog,
    Chain,
    Delta,
    catalog_of,
    find_chains,
    kept,
    names_up_to,
)


def index(version: int) -> str:
    return f"{version:032x}"


def anchor(version: int) -> Anchor:
    return Anchor(version, index(version))


def step(version: int) -> Delta:
    return Delta(version - 1, index(version - 1), version, index(version))


def names_of(catalog: Catalog) -> list[str]:
    return [f"{one.group}/{file}" for one in (*catalog.anchors, *catalog.deltas) for file in ("x", "whole")]


LINE = Catalog([anchor(1), anchor(5)], [step(v) for v in range(2, 9)])


def test_a_group_counts_once_its_marker_is_there() -> None:
    names = [*names_of(LINE), f"{anchor(9).group}/config.json", f"{step(9).group}/delta", "junk", "a/whole", "/whole"]

    assert catalog_of(names) == Catalog(sorted(LINE.anchors), sorted(LINE.deltas))
    assert names_up_to(9, names) == names[:-3]
    assert names_up_to(8, names) == names_of(LINE)


def test_a_local_copy_is_led_on_by_the_deltas_behind_it() -> None:
    assert find_chains(LINE, index(8), {index(6)})[0] == Chain(None, index(6), (step(7), step(8)))


def test_who_has_nothing_takes_the_nearest_anchor_and_its_chain() -> None:
    found = find_chains(LINE, index(8), set())

    assert found[0] == Chain(anchor(5), index(5), (step(6), step(7), step(8)))
    assert found[1].start == anchor(1)


def test_what_is_here_needs_nothing() -> None:
    assert find_chains(LINE, index(8), {index(8)})[0] == Chain(None, index(8), ())


def test_behind_a_break_the_next_anchor_is_taken() -> None:
    broken = find_chains(LINE, index(8), {index(3)}, avoid={step(4).group})

    assert [chain.start for chain in broken] == [anchor(5)]


def test_without_any_chain_the_list_is_empty() -> None:
    assert find_chains(Catalog([], LINE.deltas), index(8), set()) == []
    assert find_chains(LINE, index(99), {index(1)}) == []


def test_a_local_copy_far_behind_is_the_last_resort() -> None:
    long = Catalog([anchor(1)], [step(v) for v in range(2, LONGEST + 10)])

    first, last = find_chains(long, index(LONGEST + 9), {index(2)})

    assert (first.start, last.start) == (anchor(1), None)


def test_a_rewound_trainer_begins_a_chain_of_its_own() -> None:
    other = Delta(9, "f" * 32, 10, "e" * 32)
    catalog = Catalog([*LINE.anchors, Anchor(9, "f" * 32)], [*LINE.deltas, other])

    assert [chain.start for chain in find_chains(catalog, "e" * 32, {index(8)})] == [Anchor(9, "f" * 32)]


def test_the_newest_keeps_its_anchor_and_chain() -> None:
    assert kept(LINE, (), 8) == {one.group for one in (anchor(5), step(6), step(7), step(8))}


def test_a_version_that_somebody_needs_keeps_its_anchor_and_chain() -> None:
    assert {anchor(1).group, step(2).group, step(3).group} <= kept(LINE, {3}, 8)
    assert anchor(1).group not in kept(LINE, {5}, 8)


def test_who_holds_an_older_version_is_led_to_the_newest() -> None:
    assert {step(v).group for v in range(4, 9)} <= kept(LINE, {3}, 8)


def test_a_tick_needs_what_the_version_before_it_needs() -> None:
    assert kept(LINE, {12}, 12) == kept(LINE, {8}, 8)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.sets(st.integers(1, 40)), st.data())
def test_whatever_is_deleted_every_wanted_version_can_be_reached(
    anchors: list[bool], wanted: set[int], data: st.DataObject
) -> None:
    newest = len(anchors)
    catalog = Catalog(
        [anchor(v) for v in range(1, newest + 1) if v == 1 or anchors[v - 1]], [step(v) for v in range(2, newest + 1)]
    )
    wanted = {version for version in wanted if version <= newest}

    left = kept(catalog, wanted, newest)
    after = Catalog(
        [one for one in catalog.anchors if one.group in left], [d for d in catalog.deltas if d.group in left]
    )

    for version in {*wanted, newest}:
        assert find_chains(after, index(version), ())[0].deltas == find_chains(catalog, index(version), ())[0].deltas
        if newest - version <= LONGEST:
            assert find_chains(after, index(newest), {index(version)})[0].start is None
    assert kept(after, wanted, newest) == left


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 12), max_size=4),
    st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30),
    st.sets(st.integers(0, 12), max_size=3),
    st.integers(0, 12),
)
def test_what_stays_leads_on_as_shortly_whatever_somebody_put_there(
    anchors: set[int], steps: set[tuple[int, int]], wanted: set[int], newest: int
) -> None:
    catalog = Catalog([anchor(v) for v in anchors], [Delta(base, index(base), v, index(v)) for base, v in steps])

    left = kept(catalog, wanted, newest)

    after = Catalog(
        [one for one in catalog.anchors if one.group in left], [d for d in catalog.deltas if d.group in left]
    )
    for version in {*wanted, newest}:
        before, behind = find_chains(catalog, index(version), ()), find_chains(after, index(version), ())
        assert [len(chain.deltas) for chain in before[:1]] == [len(chain.deltas) for chain in behind[:1]]
    for chain in find_chains(catalog, index(newest), {index(v) for v in wanted}):
        ends = [chain.base, *(delta.index for delta in chain.deltas)]
        assert ends[-1] == index(newest)
        assert [delta.base_index for delta in chain.deltas] == ends[:-1]


def test_of_many_chains_the_best_are_returned() -> None:
    """All of them, each with its chain, would be the square of what somebody put into the store."""
    many = Catalog([anchor(v) for v in range(1, 101)], [step(v) for v in range(2, 101)])

    found = find_chains(many, index(100), {index(v) for v in range(1, 101)})

    assert [chain.base for chain in found] == [index(v) for v in range(100, 100 - MAX_CHAINS, -1)]
    assert [chain.start for chain in find_chains(many, index(100), ())] == [
        anchor(v) for v in range(100, 100 - MAX_CHAINS, -1)
    ]


def test_more_versions_than_a_run_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_store, "MAX_GROUPS", 9)
    assert catalog_of(names_of(LINE)) == Catalog(sorted(LINE.anchors), sorted(LINE.deltas))
    with pytest.raises(PublishError, match="has 10 versions, more than the 9 that one run may have"):
        catalog_of([*names_of(LINE), f"{anchor(7).group}/whole"])
