"""Decide how to cut a batch: a pure function, without reads or a clock. The leader gathers a view, acts, and repeats.

    View ─> decide ─> Cut: these groups, now
                  ├─> Wait: the cause (I8)
                  ├─> NeedInFlight: the in-flight jobs are needed first
                  └─> Act: Dispose, KeepRejects, Skip, GrantExtra or Conclude, then decide again

The Lua function that executes a decision checks its preconditions again, atomically.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.buffer import limits
from penstock.buffer.group import Group
from penstock.buffer.samplers import CohortPool
from penstock.buffer.view import End, InFlight, View
from penstock.config.subscription import MAX_BATCH_SAMPLES, Unit
from penstock.names import Lane
from penstock.protocol.staleness import Policy, remaining_batches
from penstock.records.cause import Cause
from penstock.records.causes import (
    BatchTooLarge,
    BatchUncommitted,
    CohortNotAdmitted,
    CohortSkipped,
    CohortUnfinished,
    FirstBatchTooSmall,
    GroupsDue,
    NoPublication,
    PayloadServersAway,
    RewindUnpublished,
)
from penstock.records.disposal import Disposal


class TooLarge(Exception):
    """The batch would have more samples than a manifest can hold."""


def group_size(group: Group, unit: Unit) -> int:
    """Return the size of one group in this unit."""
    return {Unit.GROUPS: 1, Unit.SAMPLES: group.n, Unit.TOKENS: group.tokens}[unit]


def take(groups: Iterable[Group], *, unit: Unit, size: int, multiple: int = 1) -> list[Group]:
    """Take the fewest groups in this order with ``size``, then cut back to a ``multiple`` of samples.

    Like slime's dynamic global batch (n // dp * dp), but the rest carries over as complete groups (T10). If no
    shorter batch is a multiple, a longer one is taken. [] if there are too few groups. Raises TooLarge.
    """
    taken: list[Group] = []
    total = samples = fits = 0
    for group in groups:
        taken.append(group)
        total += group_size(group, unit)
        samples += group.n
        if samples > MAX_BATCH_SAMPLES:
            raise TooLarge
        if samples % multiple == 0:
            fits = len(taken)
        if total >= size and fits:
            return taken[:fits]
    return []


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut these groups as the next batch, in this order."""

    groups: list[Group]
    #: Staleness policy used.
    policy: Policy
    #: Version that the trainer holds at its first optimizer step (T2).
    train_version: int
    #: Oldest version that may bear loss.
    floor: int
    #: Places at the gate that the batch consumes.
    consumes: int
    #: Newest published version at the decision.
    clock: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait, because nothing can be done now."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class NeedInFlight:
    """Read the in-flight jobs, ingest the completed groups, and decide again."""


@dataclass(frozen=True, slots=True)
class Dispose:
    """Dispose of these groups for the subscription."""

    reason: Disposal
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class KeepRejects:
    """Train these rejected groups, because too few others remain."""

    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Skip:
    """Skip complete cohorts that have no group left."""

    #: First skipped place in the order of admission, and number of places.
    first: int
    places: int
    #: Cause of the wait afterwards.
    cause: Cause


@dataclass(frozen=True, slots=True)
class GrantExtra:
    """Grant groups beyond the gate for the batch: nothing is in flight, and the gate admitted too few."""

    groups: int
    #: Completed groups of the run at the decision.
    completed: int
    #: Cause of the wait afterwards.
    cause: Cause


@dataclass(frozen=True, slots=True)
class Conclude:
    """Record that the batch will not be cut, because the data has ended."""

    #: Position after the last train prompt, and completed groups of the run at the decision.
    end: int
    completed: int
    #: Lanes that may contain jobs of the subscription; all were empty.
    lanes: tuple[str, ...]
    #: Cause of the wait afterwards.
    cause: Cause


Act = Dispose | KeepRejects | Skip | GrantExtra | Conclude
Decision = Cut | Wait | NeedInFlight | Act


def decide(view: View) -> Decision:
    """Decide on the batch that a subscription requests."""
    if blocked := _blocked(view):
        return blocked
    try:
        decision = _decide(view)
    except TooLarge:
        return Wait(BatchTooLarge(max_samples=MAX_BATCH_SAMPLES))
    if isinstance(decision, Cut) and (lost := limits.lost_version(view, decision.groups)):
        return Wait(lost)
    return decision


def _decide(view: View) -> Decision:
    if isinstance(view.pool, CohortPool):
        return _decide_cohort(view, view.pool)
    return _dispose_expired(view) or _decide_batch(view)


def _blocked(view: View) -> Wait | NeedInFlight | GrantExtra | None:
    """Return the decision if something other than missing groups blocks the batch, else None."""
    definition, position, model = view.definition, view.position, view.definition.model
    if 0 < position.ended <= view.n:
        return Wait(limits.data_used_up(view))
    ahead = position.cut - position.cursor
    if definition.prefetch is not None and definition.prefetch < ahead:
        return Wait(BatchUncommitted(view.name, position.cursor + 1, ahead))
    if model and view.clock == 0:
        return Wait(NoPublication(model, view.name))
    if failure := limits.filter_failure(view):
        return Wait(failure)
    if model and position.restored:
        return Wait(RewindUnpublished(model, view.name))
    return _check_first_batch(view)


def _check_first_batch(view: View) -> Wait | NeedInFlight | GrantExtra | None:
    """Return the decision if the first batch must wait for ``min_first`` groups, else None."""
    if not (missing := limits.missing_first(view)):
        return None
    if view.in_flight is None:
        return NeedInFlight()
    cause = FirstBatchTooSmall(missing, len(view.pool), view.in_flight.jobs)
    return None if view.end else _grant_extra(view, view.in_flight, missing, cause)


def _dispose_expired(view: View) -> Dispose | None:
    """Dispose of groups that the subscription can no longer train."""
    if not view.definition.model:
        return None
    if view.abandoned:
        return Dispose(Disposal.REWOUND, list(view.abandoned))
    # Groups on unreachable payload servers expire as well, and free their places at the gate.
    found = [*view.pool.below(view.floor), *view.away]
    old = [group for group in found if view.policy.gives_up(group.oldest, group.newest, view.floor)]
    return Dispose(Disposal.STALE, old) if old else None


def _decide_batch(view: View) -> Decision:
    if view.policy.waits:
        return NeedInFlight() if view.in_flight is None else _decide_in_time(view, view.in_flight)
    groups = _take(view, view.pool.order(view.n, view.floor))
    if groups:
        return _cut(view, groups)
    return NeedInFlight() if view.in_flight is None else _decide_incomplete(view, view.in_flight)


def _decide_in_time(view: View, in_flight: InFlight) -> Decision:
    """Cut the batch, or wait for groups that are due first (T4).

    Waits only while a running group can still complete in time and the batch has room for it.
    """
    groups = _take(view, view.pool.order(view.n, view.floor))
    if not groups:
        return _decide_incomplete(view, in_flight)
    if _overdue(view, in_flight, groups):
        groups = _take(view, view.pool.by_version()) or groups
    for version, _ in _overdue(view, in_flight, groups):
        coming = sum(count for oldest, count in in_flight.running.items() if oldest <= version)
        if coming and any(group.oldest > version for group in groups):
            return Wait(GroupsDue(coming, version, view.n))
    return _cut(view, groups)


def _overdue(view: View, in_flight: InFlight, groups: Sequence[Group]) -> list[tuple[int, int]]:
    definition = view.definition
    return view.policy.overdue(
        lineage=view.position.lineage,
        train_version=view.train_version,
        group_budget=definition.group_budget or len(groups) * definition.per_version,
        remaining=remaining_batches(view.n, definition.per_version) * len(groups),
        untrained=Counter(view.pool.versions) + Counter(in_flight.running),
        in_batch=Counter(group.oldest for group in groups),
    )


def _cut(view: View, groups: list[Group]) -> Cut:
    account = view.definition.account(view.name)
    first_use = sum(1 for group in groups if not group.uses.get(account))
    return _make_cut(view, groups, first_use)


def _make_cut(view: View, groups: list[Group], consumes: int) -> Cut:
    return Cut(groups, view.policy, view.train_version, view.floor, consumes, view.clock)


def _take(view: View, order: Iterator[Group], size: int | None = None) -> list[Group]:
    """Return the groups of one batch in this order; [] if too few. ``size``: None for the subscription's batch size."""
    definition = view.definition
    size = size or definition.size
    if limits.holdings(view) < size:
        if view.pool.samples > MAX_BATCH_SAMPLES:
            raise TooLarge
        return []
    return take(order, unit=definition.unit, size=size, multiple=definition.multiple)


def _rejects_to_keep(view: View, in_flight: InFlight) -> list[Group]:
    """Return rejected groups that fill the batch if no other groups can complete."""
    missing = view.definition.size - len(view.pool)
    may_come = in_flight.jobs or (in_flight.is_gate_open and in_flight.end is None)
    if not 0 < missing <= len(view.rejects) or may_come:
        return []
    lives = view.position.lineage.lives
    fit = [one for one in view.rejects if not 0 <= one.oldest < view.floor and all(map(lives, one.versions))]
    return fit[:missing]


def _decide_incomplete(view: View, in_flight: InFlight) -> Decision:
    """Decide when too few groups are ready: use rejects, cut a smaller batch at the end of the data, or wait."""
    if kept := _rejects_to_keep(view, in_flight):
        return KeepRejects(kept)
    end, cause = view.end, limits.missing_groups(view, in_flight.jobs)
    if end is None:
        return _grant_or_wait(view, in_flight, cause)
    if view.away:
        # Groups on an unreachable payload server may still be trained; `buffer:payloads` names the server.
        return Wait(cause)
    size = min(view.definition.size, limits.holdings(view))
    groups = _take(view, view.pool.order(view.n, view.floor), size) if end.train and size else []
    return _cut(view, groups) if groups else _conclude(view, in_flight, end)


def _conclude(view: View, in_flight: InFlight, end: End) -> Conclude:
    return Conclude(end.position, in_flight.completed, view.lanes, limits.data_used_up(view))


def _grant_or_wait(view: View, in_flight: InFlight, cause: Cause) -> Wait | GrantExtra:
    have = limits.holdings(view)
    missing = max(view.definition.size - have, 1)
    each = have / len(view.pool) if len(view.pool) else float(missing)
    return _grant_extra(view, in_flight, max(1, math.ceil(missing / max(each, 1))), cause)


def _grant_extra(view: View, in_flight: InFlight, groups: int, cause: Cause) -> Wait | GrantExtra:
    """Grant the missing groups if nothing is in flight: the gate admitted too few for this batch."""
    definition = view.definition
    if in_flight.jobs or not definition.driving or Lane.TRAIN not in definition.lanes:
        return Wait(cause)
    return GrantExtra(min(groups, MAX_BATCH_SAMPLES), in_flight.completed, cause)


def _decide_cohort(view: View, pool: CohortPool) -> Decision:
    """Cut the groups at the next ``size`` places in the order of admission, without dead and cancelled jobs.

    At the end of the data the last cohort has only the remaining places.
    """
    if view.in_flight is None:
        return NeedInFlight()
    in_flight, first, size = view.in_flight, view.first_place, view.definition.size
    missing = max(0, first + size - 1 - in_flight.admitted)
    end = view.end if missing else None
    if missing and end is None:
        return Wait(CohortNotAdmitted(missing, size, view.position.dropped))
    if in_flight.unfinished:
        return Wait(CohortUnfinished(in_flight.unfinished, size, view.position.dropped))
    if act := _dispose_expired(view):
        return act
    last = first + size - 1 - missing
    if away := _wait_for_servers(view, first, last):
        return Wait(away)
    groups = pool.places(first, last) if end is None or end.train else []
    if groups:
        return _make_cut(view, groups, size - missing)
    if end is not None:
        return _conclude(view, in_flight, end)
    return _skip(view, pool, in_flight)


def _wait_for_servers(view: View, first: int, last: int) -> PayloadServersAway | None:
    """Return the cause of the wait if groups of a cohort are on unreachable payload servers, else None."""
    found = [group for group in view.away if first <= group.seq <= last]
    names = tuple(sorted({server for group in found for server in group.away}))
    return PayloadServersAway(names, len(found)) if found else None


def _skip(view: View, pool: CohortPool, in_flight: InFlight) -> Skip:
    """Skip complete cohorts that are empty: dead, cancelled, disposed of, or before the subscription's start."""
    first, size, lane = view.first_place, view.definition.size, view.definition.lanes[0]
    held = [group.seq for group in view.away if group.lane == lane and group.seq >= first]
    taken = (pool.next_place(first), in_flight.first_unfinished, in_flight.admitted + 1, *held)
    places = (min(place for place in taken if place is not None) - first) // size * size
    return Skip(first, places, CohortSkipped(places))
