"""What an engine loads, by the view (T1, T5, T12, T18, I9)."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.records.publication import Publication
from penstock.records.worker_causes import CohortRunning, EvaluationRunning, WeightsUnwritten
from penstock.workers.weights.select import (
    Adopt,
    Decision,
    EngineView,
    Load,
    OtherEngine,
    Purpose,
    Restart,
    View,
    Wait,
    select_version,
)


def publication(version: int, path: str = "/w", **fields: Any) -> Publication:
    return Publication("policy", version, "disk", path, **fields)


def view_of(
    version: int,
    *published: int,
    bare: tuple[int, ...] = (),
    abandoned: tuple[tuple[int, int], ...] = (),
    purpose: Purpose = Purpose.RUN,
    offloaded: tuple[str, ...] = (),
    others: tuple[int | tuple[int, ...], ...] = (),
    partial: int = -1,
    is_lost: bool = False,
    **fields: Any,
) -> View:
    """A view of an engine of ``version``.

    Args:
        published: versions, the newest last.
        bare: those without a folder.
        others: versions that other engines generate with, and those that they are about to load.
    """
    ranges = [list(one) for one in abandoned]
    found = [publication(one, "" if one in bare else f"/w/{one}", abandoned=ranges) for one in reversed(published)]
    each = [one if isinstance(one, tuple) else (one,) for one in others]
    return View(
        purpose=purpose,
        engine=EngineView(version, 0, frozenset(offloaded), is_lost, partial),
        published=tuple(found),
        others=tuple(OtherEngine(one[0], one[1:]) for one in each),
        **fields,
    )


def said(decision: Decision) -> Any:
    """A decision in short: what is loaded, what is waited for."""
    match decision:
        case Load(one, is_sent):
            return ("send", one.version) if is_sent else one.version
        case Adopt(one):
            return ("adopt", one.version)
        case Wait(cause):
            kinds = {CohortRunning: "cohort", EvaluationRunning: "evaluation", WeightsUnwritten: "folder"}
            return kinds[type(cause)]
        case Restart():
            return "restart"
    return "keep"


ONE_STEP: dict[str, Any] = {"drains": True}


@pytest.mark.parametrize(
    ("view", "decision"),
    [
        (view_of(-1), "keep"),
        (view_of(1, 1), "keep"),
        (view_of(1, 1, 2, is_lost=True), "keep"),
        (view_of(1, 1, 2), 2),
        (view_of(1, 1, 2, is_sendable=True), ("send", 2)),
        (view_of(1, 1, 2, bare=(2,), is_sendable=True), ("send", 2)),
        (view_of(1, 1, 2, bare=(2,)), "folder"),
        (view_of(1, 1, 2, 3, bare=(3,), bound=2), 2),  # async: the latest that is available
        (view_of(1, 1, 2, 3, bare=(2, 3), bound=2), "folder"),
        (view_of(1, 1, 2, 3, 4, bare=(3, 4), bound=1), "folder"),  # too old
        (view_of(1, 1, 2, 3, bare=(3,), bound=2, failed=frozenset({"2-0"})), "folder"),
        (view_of(1, 1, 2, 3, bare=(3,), bound=2, abandoned=((2, 2),)), "folder"),
        (view_of(1, 1, 2, set_aside=frozenset({"2-0"})), "keep"),
        (view_of(1, 1, 2, set_aside=frozenset({"1-0"})), "restart"),
        (view_of(1, 1, 2, failed=frozenset({"2-0"})), 2),  # the newest is tried again and again
        (view_of(1, 1, 2, evaluating=3), "evaluation"),
        (view_of(1, 1, 2, evaluating=3, abandoned=((1, 1),)), 2),
        # Memory.
        (view_of(1, 1, 2, offloaded=("weights",)), "keep"),
        (view_of(1, 1, 2, offloaded=("kv_cache",)), 2),
        (view_of(1, 1, 2, offloaded=("kv_cache",), **ONE_STEP), "keep"),
        (view_of(1, 1, 2, offloaded=("weights",), purpose=Purpose.MEMORY), 2),
        (view_of(1, 1, offloaded=("weights",), purpose=Purpose.MEMORY), 1),
        (view_of(1, 1, 2, bare=(2,), bound=4, offloaded=("weights",), purpose=Purpose.MEMORY), "folder"),
        (view_of(1, 1, 2, bare=(2,), is_sendable=True, offloaded=("weights",), purpose=Purpose.MEMORY), "folder"),
        (view_of(1, 1, 2, set_aside=frozenset({"2-0"}), offloaded=("weights",), purpose=Purpose.MEMORY), "restart"),
        # Mixed weights.
        (view_of(1, 1, 2, bare=(2,), partial=2), "folder"),
        (view_of(1, 1, 2, bare=(2,), partial=2, is_late=True), "restart"),
        (view_of(1, 1, 2, partial=2, is_late=True, is_sendable=True), 2),
        (view_of(1, 1, 2, 3, bare=(2,), partial=2), 3),
        (view_of(1, 1, 2, 3, bare=(3,), partial=2, abandoned=((2, 2),)), "folder"),
        (view_of(1, 1, 2, partial=2, **ONE_STEP, cohorts=(1,)), 2),
    ],
)
def test_a_running_engine(view: View, decision: Any) -> None:
    assert said(select_version(view)) == decision


def test_a_revision_is_loaded_again() -> None:
    view = view_of(1, 1)
    again = replace(view, published=(publication(1, rev=1),))
    assert said(select_version(again)) == 1


@pytest.mark.parametrize(
    ("abandoned", "index", "loaded", "decision"),
    [
        ((), "same", "same", ("adopt", 2)),
        ((), "same", "other", 2),
        ((), "", "", 2),
        (((1, 1),), "same", "same", 2),  # its requests must not continue (T1)
    ],
)
def test_a_publication_of_the_same_weights_is_adopted(abandoned: Any, index: str, loaded: str, decision: Any) -> None:
    view = view_of(1, 1, 2)
    newest = replace(view.published[0], index=index, abandoned=[list(one) for one in abandoned])
    view = replace(view, published=(newest, view.published[1]), loaded=publication(1, index=loaded), is_sendable=False)
    assert said(select_version(view)) == decision
    mine = replace(view, loaded=publication(0, index=loaded))
    assert said(select_version(mine)) == 2, "the engine has other weights than this worker loaded"


@pytest.mark.parametrize(
    ("cohorts", "others", "decision"),
    [
        ((), (), 15),
        ((13,), (), "cohort"),  # generated here
        ((15, 16), (), 15),  # generated with the newest, or a later one
        ((14,), (), 15),  # nobody can have it
        ((14,), (13,), 15),
        ((13, 14), (), "cohort"),
        ((14,), (14,), "cohort"),  # generated there
        ((14,), ((13, 14),), "cohort"),  # about to be
        ((14,), (15,), 15),
    ],
)
def test_T5_a_cohort_is_waited_for_while_an_engine_may_generate_it(cohorts: Any, others: Any, decision: Any) -> None:
    view = view_of(13, 13, 14, 15, bare=(14,), cohorts=cohorts, others=others, **ONE_STEP)
    assert said(select_version(view)) == decision


@pytest.mark.parametrize("others", [(14,), ((13, 14),)])
def test_a_cohort_whose_tokens_are_dropped_is_not_waited_for(others: Any) -> None:
    view = view_of(13, 13, 14, 15, bare=(14,), cohorts=(14,), others=others, abandoned=((14, 14),), **ONE_STEP)
    assert said(select_version(view)) == 15
    # Engines died of what another is about to load.
    view = view_of(13, 13, 14, 15, bare=(14,), cohorts=(14,), others=((13, 14),), **ONE_STEP)
    assert said(select_version(replace(view, set_aside=frozenset({"14-0"})))) == 15


@pytest.mark.parametrize("abandoned", [((14, 14),), ()])
def test_T1_an_engine_of_an_abandoned_version_waits_for_nothing(abandoned: Any) -> None:
    view = view_of(14, 13, 14, 15, cohorts=(13,), abandoned=abandoned, **ONE_STEP)
    assert said(select_version(view)) == (15 if abandoned else "cohort")


@pytest.mark.parametrize(
    ("cohorts", "folders", "first"),
    [
        ((14, 15), (13, 14, 15, 16), 14),  # generated with it, though 16 is available by now
        ((14,), (15, 16), 15),  # 14 has no folder any more
        ((14,), (), 17),
        ((13, 14), (14,), "cohort"),  # 13 has to end first
        ((17,), (14, 15, 16), 17),
        ((), (14, 15, 16), 17),
    ],
)
def test_T5_an_engine_loads_the_version_of_the_oldest_cohort_first(cohorts: Any, folders: Any, first: Any) -> None:
    """The disk is slower than a step: several versions have their folders at once."""
    bare = tuple({13, 14, 15, 16} - set(folders))
    view = view_of(13, 13, 14, 15, 16, 17, bare=bare, cohorts=cohorts, **ONE_STEP)
    assert said(select_version(view)) == first
    assert said(select_version(replace(view, drains=False))) == 17


@pytest.mark.parametrize(
    ("other", "first"),
    [(14, 14), (15, 15), (17, 17), (16, 14), (18, 14)],
    ids=["its own", "later", "the newest", "abandoned", "not known here"],
)
@pytest.mark.parametrize("version", [13, -1])
def test_T5_a_cohort_that_was_begun_with_a_later_version_is_continued_with_that(
    other: int, first: int, version: int
) -> None:
    """Its own had no folder then."""
    abandoned = ((16, 16),)
    view = view_of(version, 13, 14, 15, 16, 17, cohorts=(14,), others=(other,), abandoned=abandoned, **ONE_STEP)
    assert said(select_version(view)) == first


@pytest.mark.parametrize(
    ("cohorts", "version", "offloaded", "had", "first"),
    [
        ((14, 15), -1, (), -1, 14),
        ((), -1, (), -1, 17),
        ((14, 15), -1, (), 15, 15),  # no engine goes back behind what it had
        ((14,), -1, (), 17, 17),
        ((14, 15), 14, ("weights",), -1, 14),  # it was in that memory
        ((13, 15), 14, ("weights", "kv_cache"), -1, 14),
    ],
)
def test_T5_an_engine_without_weights_begins_with_the_version_of_the_oldest_cohort(
    cohorts: Any, version: int, offloaded: Any, had: int, first: int
) -> None:
    purpose = Purpose.MEMORY if offloaded else Purpose.START
    loaded = publication(had) if had >= 0 else None
    view = view_of(
        version, 13, 14, 15, 16, 17, cohorts=cohorts, offloaded=offloaded, purpose=purpose, loaded=loaded, **ONE_STEP
    )
    assert said(select_version(view)) == first


@pytest.mark.parametrize(
    ("cohorts", "others", "started"),
    [
        ((14,), (14,), False),
        ((13,), (14,), False),  # begun late
        ((14,), (15,), True),
        ((14,), (13,), True),
        ((15,), (14,), True),
        ((14,), (), True),
    ],
)
def test_T5_an_engine_is_not_started_with_what_comes_after_a_cohort_that_is_generated_elsewhere(
    cohorts: Any, others: Any, started: bool
) -> None:
    view = view_of(-1, 15, cohorts=cohorts, others=others, purpose=Purpose.START, is_lost=True, **ONE_STEP)
    assert said(select_version(view)) == (15 if started else "keep")
    assert said(select_version(replace(view, drains=False))) == 15


@pytest.mark.parametrize(
    ("view", "decision"),
    [
        (view_of(-1), "keep"),
        (view_of(-1, 1, 2), 2),
        (view_of(-1, 1, 2, bare=(1, 2), bound=4, is_sendable=True), "keep"),  # it starts with what is complete (I9)
        (view_of(-1, 1, 2, 3, bare=(3,), bound=1), 2),
        (view_of(-1, 1, 2, 3, bare=(2, 3), bound=1), "keep"),  # older than the bound
        (view_of(-1, 1, 2, 3, bare=(3,)), "keep"),
        (view_of(-1, 1, 2, set_aside=frozenset({"2-0"})), 1),
        (view_of(-1, 1, 2, set_aside=frozenset({"2-0"}), abandoned=((1, 1),)), "keep"),
        (view_of(-1, 1, 2, failed=frozenset({"2-0"}), loaded=publication(1)), 1),
        (view_of(-1, 1, 2, failed=frozenset({"2-0"})), "keep"),
    ],
)
def test_I9_an_engine_that_starts(view: View, decision: Any) -> None:
    starting = replace(view, purpose=Purpose.START, engine=replace(view.engine, is_lost=True))
    assert said(select_version(starting)) == decision


ids = st.frozensets(st.integers(1, 6).map(lambda version: f"{version}-0"), max_size=3)
versions = st.lists(st.integers(1, 6), max_size=3)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view of up to six versions."""
    newest = draw(st.integers(0, 6))
    version = draw(st.integers(-1, newest)) if newest else -1
    partial = draw(st.integers(1, newest)) if newest and draw(st.booleans()) else -1
    return view_of(
        version,
        *range(1, newest + 1),
        bare=tuple(draw(versions)),
        abandoned=tuple((one, one) for one in draw(versions) if one < newest),
        purpose=draw(st.sampled_from(Purpose)),
        offloaded=tuple(draw(st.sampled_from([(), (), ("kv_cache",), ("weights", "kv_cache")]))),
        others=tuple((one, one + 1) for one in draw(versions)),
        partial=partial,
        is_lost=draw(st.booleans()),
        loaded=publication(version, index="same") if version >= 0 and draw(st.booleans()) else None,
        is_sendable=draw(st.booleans()),
        set_aside=draw(ids),
        failed=draw(ids),
        drains=draw(st.booleans()),
        bound=draw(st.integers(0, 4)),
        cohorts=tuple(sorted(draw(versions))),
        evaluating=draw(st.integers(0, 1)),
        is_late=draw(st.booleans()),
    )


@given(views())
@settings(max_examples=2000, deadline=None)
def test_whatever_the_view_no_version_is_loaded_that_may_not_be(view: View) -> None:
    decision, newest, engine = select_version(view), view.newest, view.engine
    if engine.partial >= 0 and view.purpose is not Purpose.START and newest is not None and not engine.is_lost:
        assert isinstance(decision, Load | Wait | Restart)
    if not isinstance(decision, Load | Adopt):
        return
    loaded = decision.publication
    assert newest is not None
    assert loaded.version <= newest.version, "no engine is ahead of the clock"
    assert not newest.abandons(loaded.version)
    assert loaded.id not in view.set_aside
    if view.purpose is Purpose.START:
        assert loaded.is_whole
        assert loaded.id not in view.failed
    elif view.purpose is Purpose.RUN and engine.partial < 0:
        assert loaded.version > engine.version, "versions only increase"
    if isinstance(decision, Load) and not decision.is_sent:
        assert loaded.is_whole
    if engine.partial >= 0 and view.purpose is not Purpose.START:
        assert loaded.version >= engine.partial
