"""Causes of the buffer's waits (I8).

The limit on admission is the gate (T3, ``places`` of the Lua helpers); the limits on cutting are the batch size, the
groups needed before the first batch, the bound (T4, in the decision) and filters that cannot be run.
"""

from collections.abc import Iterable, Mapping

from penstock.buffer.group import Group
from penstock.buffer.payload_servers import Away
from penstock.buffer.subscription import Subscription
from penstock.buffer.view import View
from penstock.config.subscription import Unit
from penstock.records.cause import Cause
from penstock.records.causes import (
    DataUsedUp,
    FilterFailing,
    FilterUnknown,
    GroupsMissing,
    PayloadServersAway,
    VersionLost,
)


def holdings(view: View | Subscription) -> int:
    """Return the unused groups of a subscription in the unit of its batch size."""
    pool = view.pool
    return {Unit.GROUPS: len(pool), Unit.SAMPLES: pool.samples, Unit.TOKENS: pool.tokens}[view.definition.unit]


def filter_failure(view: View) -> Cause | None:
    """Return why groups cannot be filtered, or None."""
    if view.unfilterable:
        return FilterUnknown(view.unfilterable)
    return FilterFailing(len(view.stuck), next(iter(view.stuck.values()))) if view.stuck else None


def missing_first(view: View) -> int:
    """Return how many groups the first batch waits for; 0 if there are enough, and for later batches."""
    return max(0, view.definition.min_first - len(view.pool)) if view.position.cut == 0 else 0


def lost_version(view: View, groups: Iterable[Group]) -> VersionLost | None:
    """Return a version after the newest published one that generated tokens of these groups, or None.

    Redis lost its publication, as after a power loss, and engines had it. The trainer's next publication abandons such
    versions, and their groups with them; no trainer could train them before.
    """
    newest = max((group.newest for group in groups), default=-1)
    model = view.definition.model
    return VersionLost(model, newest, view.clock, view.name) if model and newest > view.clock else None


def used_up(view: View) -> DataUsedUp:
    """Return the cause that the data has ended."""
    return DataUsedUp(holdings(view), view.definition.size, view.definition.unit)


def missing_groups(view: View, running: int) -> GroupsMissing:
    """Return the cause that too few groups are ready."""
    definition, pool = view.definition, view.pool
    is_full = bool(definition.keep_groups) and len(pool) >= definition.keep_groups
    return GroupsMissing(
        holdings(view),
        definition.size,
        definition.unit,
        running,
        rejects=len(view.rejects),
        dropped=view.position.dropped,
        multiple=definition.multiple,
        is_full=is_full,
    )


def held_for_servers(away: Mapping[str, Away], groups: Iterable[Group]) -> PayloadServersAway | None:
    """Return the payload servers that do not answer, and the groups held back for them; None if all answer."""
    held = sum(bool(away.keys() & set(group.away)) for group in groups)
    errors = "; ".join(f"{name}: {one.why.rstrip('.')}" for name, one in sorted(away.items()))
    return PayloadServersAway(tuple(sorted(away)), held, errors) if away else None
