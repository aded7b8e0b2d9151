"""The decision of the cut, row by row: what is there, and what follows from it. No Redis, no clock."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.buffer.decision import Conclude, Cut, Dispose, GrantExtra, KeepRejects, NeedInFlight, Skip, Wait, decide
from penstock.buffer.group import Group
from penstock.buffer.samplers import make_pool
from penstock.buffer.view import End, InFlight, View
from penstock.config.subscription import Definition
from penstock.protocol.position import Position
from penstock.protocol.staleness import Lineage
from penstock.records.cause import Cause
from penstock.records.causes import (
    BatchTooLarge,
    BatchUncommitted,
    CohortNotAdmitted,
    CohortSkipped,
    CohortUnfinished,
    DataUsedUp,
    FilterFailing,
    FilterUnknown,
    FirstBatchTooSmall,
    GroupsDue,
    GroupsMissing,
    NoPublication,
    PayloadServersAway,
    RewindUnpublished,
    VersionLost,
)
from penstock.records.disposal import Disposal

#: A driving subscription of two groups a batch, at version 5 with bound 2: its floor is 3.
CLOCK, BOUND, FLOOR = 5, 2, 3
NOTHING = InFlight()


def group(place: int, oldest: int = CLOCK, **over: Any) -> Group:
    values: dict[str, Any] = {
        "job": f"d/0/{place}", "lane": "train", "seq": place, "completed": place, "n": 2, "oldest": oldest,
        "versions": tuple(range(oldest, over.pop("newest", oldest) + 1)) if oldest >= 0 else (), "kept": 2,
        "tokens": 10,
    }  # fmt: skip
    return Group(**(values | over))


def stored(fields: dict[str, Any]) -> Definition:
    """What Redis holds, whatever the fields mean together."""
    texts = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in fields.items()}
    return Definition.read({Definition.key_of(name).encode(): text.encode() for name, text in texts.items()}, "actor")


def view(
    groups: list[Group] | int = 2,
    *,
    name: str = "actor",
    position: dict[str, Any] | None = None,
    in_flight: InFlight | None = None,
    seen: dict[str, Any] | None = None,
    **definition: Any,
) -> View:
    """A view of a subscription whose pool holds these groups.

    ``seen``: fields of the view beside it.
    """
    values: dict[str, Any] = {
        "bound": BOUND, "size": 2, "model": "policy", "driving": True, "on_expiry": "mask",
        "sampler": "fifo",
    }  # fmt: skip
    defined = stored(values | definition)
    pool = make_pool(defined.sampler, seed=defined.seed)
    for one in [group(i) for i in range(groups)] if isinstance(groups, int) else groups:
        pool.add(one)
    return View(
        name, defined, Position(**(position or {})), pool, in_flight=in_flight, **({"clock": CLOCK} | (seen or {}))
    )


def cohort(groups: list[Group] | int = 2, **over: Any) -> View:
    """A view of one that takes cohorts; all that was asked for is admitted and finished unless said otherwise."""
    placed = [group(i + 1) for i in range(groups)] if isinstance(groups, int) else groups
    return view(placed, **({"sampler": "cohort", "mode": "sync", "in_flight": InFlight(admitted=2)} | over))


def jobs(decided: object) -> list[int]:
    assert isinstance(decided, Cut | Dispose | KeepRejects), decided
    return [one.seq for one in decided.groups]


# --- what holds a batch up, however many groups are ready -----------------------------------------------------------

WAITS: dict[str, tuple[View, Cause]] = {
    "the data has ended": (
        view(1, position={"cut": 3, "ended": 4}),
        DataUsedUp(1, 2, "groups"),
    ),
    "enough is cut ahead": (
        view(position={"cut": 3, "cursor": 1}, prefetch=1),
        BatchUncommitted("actor", 2, 2),
    ),
    "nothing is published": (view(seen={"clock": 0}), NoPublication("policy", "actor")),
    "a filter is unknown": (
        view(seen={"unfilterable": "m:f"}),
        FilterUnknown("m:f"),
    ),
    "a filter raised": (
        view(seen={"stuck": {"d/0/9": "filter m:f raised on group d/0/9: no", "d/0/8": "the same"}}),
        FilterFailing(2, "filter m:f raised on group d/0/9: no"),
    ),
    "too few for a first batch": (
        view(min_first=5, in_flight=InFlight(jobs=1, end=End(9, False))),
        FirstBatchTooSmall(3, 2, running=1),
    ),
    "a restored trainer has to publish": (
        view(position={"restored": True}),
        RewindUnpublished("policy", "actor"),
    ),
    "a version is not known, since Redis lost its publication": (
        view([group(0), group(5, versions=(5, 9))]),
        VersionLost("policy", 9, 5, "actor"),
    ),
    # --- too few groups
    "some run": (view(1, in_flight=InFlight(jobs=3)), GroupsMissing(1, 2, "groups", running=3)),
    "samples": (
        view(1, unit="samples", size=5, in_flight=InFlight(jobs=3)),
        GroupsMissing(2, 5, "samples", running=3),
    ),
    "tokens": (
        view(1, unit="tokens", size=25, in_flight=InFlight(jobs=3)),
        GroupsMissing(10, 25, "tokens", running=3),
    ),
    "a multiple of samples": (
        view([group(0, n=3)], unit="samples", size=2, multiple=2, in_flight=InFlight(jobs=3)),
        GroupsMissing(3, 2, "samples", running=3, multiple=2),
    ),
    "some were dropped": (
        view(1, position={"dropped": {"stale": 2, "filter/x": 7}}, in_flight=InFlight(jobs=3)),
        GroupsMissing(1, 2, "groups", running=3, dropped={"stale": 2, "filter/x": 7}),
    ),
    "no more may be held": (
        view(1, keep_groups=1, in_flight=InFlight(jobs=3)),
        GroupsMissing(1, 2, "groups", running=3, is_full=True),
    ),
    "who does not drive is owed nothing": (
        view(1, driving=False, in_flight=NOTHING),
        GroupsMissing(1, 2, "groups", running=0),
    ),
    "nor who takes no train jobs": (
        view(1, lanes=("eval",), in_flight=replace(NOTHING, end=End(9, True))),
        GroupsMissing(1, 2, "groups", running=0),
    ),
    "at the end of the data groups are held back": (
        view(1, in_flight=InFlight(end=End(9, True)), seen={"away": [group(7, away=frozenset({"p1"}))]}),
        GroupsMissing(1, 2, "groups", running=0),
    ),
    "more than a manifest holds": (
        view([group(0, n=70_000)], unit="tokens", size=10**9),
        BatchTooLarge(max_samples=65536),
    ),
    # --- T4
    "running groups are due": (
        view(3, on_expiry="wait", in_flight=InFlight(jobs=6, running={3: 2, 4: 4})),
        GroupsDue(2, 3, batch=1),
    ),
    "more run than later batches can train in time": (
        view(3, on_expiry="wait", in_flight=InFlight(jobs=3, running={4: 3})),
        GroupsDue(3, 4, batch=1),
    ),
    # --- cohorts
    "a cohort is not admitted": (
        cohort(1, in_flight=InFlight(admitted=1, jobs=1)),
        CohortNotAdmitted(1, 2),
    ),
    "a cohort is not finished": (
        cohort(1, in_flight=InFlight(admitted=2, unfinished=1), position={"dropped": {"stale": 1}}),
        CohortUnfinished(1, 2, {"stale": 1}),
    ),
    "a cohort is held back": (
        cohort(1, seen={"away": [group(2, away=frozenset({"p2", "p1"})), group(3, away=frozenset({"p3"}))]}),
        PayloadServersAway(("p1", "p2"), 1),
    ),
    "one_step waits for a cohort": (
        cohort(1, mode="one_step", bound=1, in_flight=InFlight(admitted=2, unfinished=1)),
        CohortUnfinished(1, 2),
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_I8_it_waits_for_a_cause(name: str) -> None:
    asked, cause = WAITS[name]
    assert decide(asked) == Wait(cause)


# --- cuts ---------------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[View, list[int]]] = {
    "async, in the order of arrival": (view(3), [0, 1]),
    "oldest version first": (view([group(0), group(1, 4), group(2, 3)], sampler="oldest_version"), [2, 1]),
    "samples": (view(3, unit="samples", size=3), [0, 1]),
    "a multiple of samples": (view(4, unit="samples", size=5, multiple=4), [0, 1]),
    "who is bounded by no clock": (view(model="", driving=False, seen={"clock": 0, "newest": 7}), [0, 1]),
    "a first batch that has enough": (view(3, min_first=3), [0, 1]),
    "min_first means the first batch only": (view(position={"cut": 1, "cursor": 1}, min_first=9), [0, 1]),
    "all of a small first batch when the data has ended": (
        view(1, min_first=9, in_flight=InFlight(end=End(9, True))),
        [0],
    ),
    "a short last batch": (view(1, in_flight=InFlight(end=End(9, True))), [0]),
    "wait, and nothing is due": (view(3, on_expiry="wait", in_flight=InFlight(jobs=2, running={5: 2})), [0, 1]),
    "wait, and what runs can be trained in time": (
        view(3, on_expiry="wait", in_flight=InFlight(jobs=2, running={4: 2})),
        [0, 1],
    ),
    "wait, and what is due is ready": (
        view([group(0), group(1), *(group(i, 3) for i in range(2, 7))], on_expiry="wait", in_flight=NOTHING),
        [2, 3],
    ),
    "wait, and what runs would come too late for a full batch": (
        view(
            [group(0, 3), group(1, 3)], on_expiry="wait", in_flight=InFlight(jobs=5, running={3: 5}),
        ),
        [0, 1],
    ),
    "sync": (cohort(bound=0), [1, 2]),
    "one_step": (cohort([group(1, 4), group(2, 4), group(3)], mode="one_step", bound=1), [1, 2]),
    "a cohort with a buried place": (cohort([group(2)]), [2]),
    "the cohort behind what was cut and skipped": (
        cohort([group(i) for i in range(1, 7)], position={"cum": 2, "skipped": 2}, in_flight=InFlight(admitted=6)),
        [5, 6],
    ),
    "a last cohort": (cohort(1, in_flight=InFlight(admitted=1, end=End(1, True))), [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_it_cuts(name: str) -> None:
    asked, wanted = CUTS[name]
    assert jobs(decide(asked)) == wanted


def test_T2_a_cut_says_what_it_is_guarded_by() -> None:
    """Batch 5 of a version that trains two, cut two batches ahead: its trainer will hold version 6."""
    used = group(0, uses={"actor": 1})
    asked = view([used, group(1)], reuse=2, per_version=2, position={"cut": 4, "cursor": 2, "through": 2})
    decided = decide(asked)
    assert isinstance(decided, Cut)
    assert (decided.train_version, decided.floor, decided.clock) == (6, 4, 5)
    assert decided.consumes == 1, "the place of one that is used again was consumed by its first use"
    assert decided.policy == asked.policy


def test_a_cohort_consumes_its_places_whatever_is_left_of_it() -> None:
    whole, last = cohort([group(2)]), cohort([group(1)], in_flight=InFlight(admitted=1, end=End(1, True)))
    for asked, consumes in ((whole, 2), (last, 1)):
        decided = decide(asked)
        assert isinstance(decided, Cut)
        assert decided.consumes == consumes


@pytest.mark.parametrize("mode", ["copy", "pool"])
def test_a_copy_and_a_member_of_a_pool_take_what_is_theirs_and_follow_the_clock(mode: str) -> None:
    share = "p" if mode == "pool" else ""
    used = {"share:p": 0} if share else {"actor": 1, "critic": 0}
    asked = view([group(0, uses=used), group(1)], name="critic", share=share, driving=False, position={"cut": 7})
    decided = decide(asked)
    assert isinstance(decided, Cut)
    assert (jobs(decided), decided.consumes) == ([0, 1], 2), "uses by others are not its own"
    assert decided.train_version == CLOCK, "who does not drive trains at the version that there is"


# --- acts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_expiry", ["wait", "drop"])
def test_I6_what_is_older_than_the_bound_is_given_up_first(on_expiry: str) -> None:
    there = [group(0, FLOOR), group(1, FLOOR - 1, newest=CLOCK), group(2), group(3, -1)]
    away = [group(8, 1, away=frozenset({"p1"})), group(9, away=frozenset({"p1"}))]
    decided = decide(view(there, on_expiry=on_expiry, in_flight=NOTHING, seen={"away": away}))
    assert decided == Dispose(Disposal.STALE, [there[1], away[0]]), "at the bound it is trained"


def test_I6_with_mask_only_what_would_bear_no_loss_at_all_is_given_up() -> None:
    there = [group(0, FLOOR - 1), group(1, FLOOR - 1, newest=FLOOR), group(2)]
    assert decide(view(there)) == Dispose(Disposal.STALE, [there[0]])
    assert jobs(decide(view(there[1:]))) == [1, 2]


def test_T1_what_holds_an_abandoned_version_is_given_up_and_ages_nothing() -> None:
    dead = group(0, 4)
    lineage = Lineage(((3, 4),))
    there = [dead, group(1, 2), group(2, 1), group(3, 5)]
    asked = view(there, position={"lineage": lineage}, seen={"abandoned": [dead]})
    assert decide(asked) == Dispose(Disposal.REWOUND, [dead])
    asked = view(there[1:], position={"lineage": lineage})
    assert asked.floor == 1, "of versions 5 and 2 alone"
    assert jobs(decide(asked)) == [1, 2]


def test_who_follows_no_clock_gives_nothing_up() -> None:
    asked = view([group(0, 1), group(1, 1)], model="", driving=False, seen={"clock": 0, "newest": 50})
    assert jobs(decide(asked)) == [0, 1]


ENDS: dict[str, tuple[InFlight, bool]] = {
    "the gate is open": (InFlight(), False),
    "the gate is closed": (InFlight(is_gate_open=False), True),
    "the data has ended": (InFlight(end=End(9, False)), True),
    "one runs that the gate let in before": (InFlight(jobs=1, is_gate_open=False), False),
}


@pytest.mark.parametrize("name", ENDS)
def test_rejects_are_kept_only_where_nothing_else_can_come(name: str) -> None:
    seen, kept = ENDS[name]
    rejects = [group(8, FLOOR - 1), group(7), group(9)]
    decided = decide(view(1, in_flight=seen, seen={"rejects": rejects}))
    assert isinstance(decided, KeepRejects) == kept
    if kept:
        assert jobs(decided) == [7], "as many as are missing, and none that is too old"


def test_rejects_are_not_kept_where_they_do_not_fill_a_batch() -> None:
    decided = decide(view(0, in_flight=InFlight(is_gate_open=False, jobs=1), seen={"rejects": [group(7)]}))
    assert decided == Wait(GroupsMissing(0, 2, "groups", running=1, rejects=1))


@pytest.mark.parametrize(
    ("asked", "owed"),
    [
        (view(0, size=3, in_flight=InFlight(completed=7)), 1),
        (view(1, size=3, in_flight=InFlight(completed=7)), 2),
        (view(1, unit="samples", size=9, in_flight=InFlight(completed=7)), 4),
        (view(1, unit="tokens", size=100, in_flight=InFlight(completed=7)), 9),
        (view([group(0, n=3)], unit="samples", size=2, multiple=2, in_flight=InFlight(completed=7)), 1),
    ],
)
def test_T3_groups_are_owed_where_nothing_is_in_flight_and_too_few_are_ready(asked: View, owed: int) -> None:
    decided = decide(asked)
    assert isinstance(decided, GrantExtra)
    assert (decided.groups, decided.completed) == (owed, 7)
    assert isinstance(decided.cause, GroupsMissing)
    assert decided.cause.running == 0


#: Nothing is in flight and the gate is closed.
IDLE = InFlight(completed=7, is_gate_open=False)


@pytest.mark.parametrize(
    ("asked", "owed"),
    [
        (view(2, min_first=32, unit="samples", size=64, in_flight=IDLE), 30),
        (view(2, min_first=32, unit="tokens", size=10, in_flight=IDLE), 30),
        (view(8, min_first=32, size=4, in_flight=IDLE), 24),
        (cohort(3, min_first=4, size=4, in_flight=InFlight(admitted=4, completed=7)), 1),
        (view(2, min_first=32, in_flight=IDLE, seen={"rejects": [group(7)]}), 30),
    ],
)
def test_I8_a_first_batch_is_owed_the_groups_that_the_gate_did_not_let_in(asked: View, owed: int) -> None:
    cause = FirstBatchTooSmall(owed, len(asked.pool), 0)
    assert decide(asked) == GrantExtra(owed, 7, cause)
    assert asked.in_flight is not None
    assert decide(replace(asked, in_flight=replace(asked.in_flight, jobs=1))) == Wait(replace(cause, running=1)), (
        "they may come yet"
    )
    later = decide(replace(asked, position=Position(cut=1)))
    assert not isinstance(later, GrantExtra) or asked.definition.unit != "groups"


def test_T1_nothing_is_owed_to_a_first_batch_before_the_restored_trainer_has_published() -> None:
    decided = decide(view(1, min_first=5, position={"restored": True}, in_flight=IDLE))
    assert isinstance(decided, Wait)
    assert isinstance(decided.cause, RewindUnpublished)


@pytest.mark.parametrize(("asked"), [view(1), view(0), cohort(1, in_flight=InFlight(admitted=1))])
@pytest.mark.parametrize("train", [True, False])
def test_the_end_of_the_data_is_concluded_where_nothing_is_left_to_be_trained(asked: View, train: bool) -> None:
    assert asked.in_flight is None or asked.in_flight.admitted
    seen = replace(asked.in_flight or NOTHING, completed=7, end=End(9, train))
    decided = decide(replace(asked, in_flight=seen))
    if train and len(asked.pool):
        assert jobs(decided) in ([0], [1])
        return
    left = len(asked.pool)
    assert decided == Conclude(9, 7, ("train", "resume", "suspect"), DataUsedUp(left, 2, "groups"))


def test_the_end_is_not_the_end_while_a_job_is_in_flight() -> None:
    decided = decide(view(1, in_flight=InFlight(jobs=1, end=End(9, True))))
    assert decided == Wait(GroupsMissing(1, 2, "groups", running=1))


SKIPS: dict[str, tuple[View, int]] = {
    "nothing was ever left": (cohort(0, in_flight=InFlight(admitted=7)), 6),
    "up to the cohort that holds the next group": (cohort([group(6)], in_flight=InFlight(admitted=9)), 4),
    "up to the one that is unfinished": (cohort(0, in_flight=InFlight(admitted=9, first_unfinished=3)), 2),
    "up to one that is held back": (
        cohort(0, in_flight=InFlight(admitted=9), seen={"away": [group(5, away=frozenset({"p1"}))]}),
        4,
    ),
}


@pytest.mark.parametrize("name", SKIPS)
def test_whole_cohorts_of_which_nothing_is_left_are_skipped(name: str) -> None:
    asked, places = SKIPS[name]
    assert decide(asked) == Skip(1, places, CohortSkipped(places))


# --- what has to be known first -----------------------------------------------------------------------------------

LOOKS: dict[str, View] = {
    "T4: what runs may be due": view(on_expiry="wait"),
    "too few are ready": view(1),
    "a first batch is too small, unless the data has ended": view(min_first=9),
    "a cohort is complete by what is finished": cohort(in_flight=None),
}


@pytest.mark.parametrize("name", LOOKS)
def test_it_asks_for_a_look_at_what_is_in_flight_and_never_twice(name: str) -> None:
    assert decide(LOOKS[name]) == NeedInFlight()
    for seen in (NOTHING, InFlight(jobs=1, admitted=9, running={4: 1}), InFlight(end=End(1, True))):
        assert not isinstance(decide(replace(LOOKS[name], in_flight=seen)), NeedInFlight)


def test_a_batch_by_difficulty_is_of_what_is_due_first_and_then_of_what_is_half_right() -> None:
    groups = [group(0, right=0.0), group(1, right=1.0), group(2, right=0.5), group(3, FLOOR, right=1.0)]
    assert jobs(decide(view(groups, sampler="difficulty"))) == [3, 2]
    assert jobs(decide(view(groups[:3], sampler="difficulty"))) == [2, 0]
