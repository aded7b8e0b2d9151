"""Chains to a version, and what of them may be deleted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PublishError
from penstock.weights import delta_store
from penstock.weights.delta_store import (
    LONGEST,
    Anchor,
    Catalog,
    Chain,
    Delta,
    catalog_of,
    find_chain,
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


def start(chain: Chain | None) -> Anchor | None:
    assert chain is not None
    return chain.start


def deltas(chain: Chain | None) -> tuple[Delta, ...]:
    assert chain is not None
    return chain.deltas


LINE = Catalog([anchor(1), anchor(5)], [step(v) for v in range(2, 9)])


def test_a_group_counts_once_its_marker_is_there() -> None:
    names = [*names_of(LINE), f"{anchor(9).group}/config.json", f"{step(9).group}/delta", "junk", "a/whole", "/whole"]

    assert catalog_of(names) == Catalog(sorted(LINE.anchors), sorted(LINE.deltas))
    assert names_up_to(9, names) == names[:-3]
    assert names_up_to(8, names) == names_of(LINE)


def test_a_local_copy_is_led_on_by_the_deltas_behind_it() -> None:
    assert find_chain(LINE, index(8), {index(6)}) == Chain(None, index(6), (step(7), step(8)))


def test_who_has_nothing_takes_the_nearest_anchor_and_its_chain() -> None:
    assert find_chain(LINE, index(8), set()) == Chain(anchor(5), index(5), (step(6), step(7), step(8)))
    steps = tuple(step(version) for version in range(2, 9))
    assert find_chain(LINE, index(8), set(), {anchor(5).group}) == Chain(anchor(1), index(1), steps)


def test_what_is_here_needs_nothing() -> None:
    assert find_chain(LINE, index(8), {index(8)}) == Chain(None, index(8), ())


def test_behind_a_break_the_next_anchor_is_taken() -> None:
    broken = {step(4).group}

    assert start(find_chain(LINE, index(8), {index(3)}, avoid=broken)) == anchor(5)
    assert find_chain(LINE, index(8), {index(3)}, avoid=broken | {anchor(5).group}) is None


def test_without_any_chain_there_is_none() -> None:
    assert find_chain(Catalog([], LINE.deltas), index(8), set()) is None
    assert find_chain(LINE, index(99), {index(1)}) is None


def test_a_local_copy_far_behind_is_the_last_resort() -> None:
    long = Catalog([anchor(1)], [step(v) for v in range(2, LONGEST + 10)])

    assert start(find_chain(long, index(LONGEST + 9), {index(2)})) == anchor(1)
    assert start(find_chain(long, index(LONGEST + 9), {index(2)}, {anchor(1).group})) is None


def test_a_rewound_trainer_begins_a_chain_of_its_own() -> None:
    other = Delta(9, "f" * 32, 10, "e" * 32)
    catalog = Catalog([*LINE.anchors, Anchor(9, "f" * 32)], [*LINE.deltas, other])

    assert find_chain(catalog, "e" * 32, {index(8)}) == Chain(Anchor(9, "f" * 32), "f" * 32, (other,))


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
        assert deltas(find_chain(after, index(version), ())) == deltas(find_chain(catalog, index(version), ()))
        if newest - version <= LONGEST:
            assert start(find_chain(after, index(newest), {index(version)})) is None
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
        before, behind = find_chain(catalog, index(version), ()), find_chain(after, index(version), ())
        assert (before is None) == (behind is None)
        assert before is None or len(deltas(before)) == len(deltas(behind))
    if (chain := find_chain(catalog, index(newest), {index(v) for v in wanted})) is not None:
        ends = [chain.base, *(delta.index for delta in chain.deltas)]
        assert ends[-1] == index(newest)
        assert [delta.base_index for delta in chain.deltas] == ends[:-1]


def test_more_versions_than_a_run_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_store, "MAX_GROUPS", 9)
    assert catalog_of(names_of(LINE)) == Catalog(sorted(LINE.anchors), sorted(LINE.deltas))
    with pytest.raises(PublishError, match="has 10 versions, more than the 9 that one run may have"):
        catalog_of([*names_of(LINE), f"{anchor(7).group}/whole"])
