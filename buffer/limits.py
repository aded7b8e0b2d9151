"""Determine the causes of the buffer's waits (I8).

The limit on admission is the gate (T3, ``places`` of the Lua helpers); the limits on cutting are the batch size, the
groups required for the first batch, the bound (T4, decision.py) and filters that cannot run.
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
    """Return the size of a subscription's pool in the unit of its batch size."""
    pool = view.pool
    return {Unit.GROUPS: len(pool), Unit.SAMPLES: pool.samples, Unit.TOKENS: pool.tokens}[view.definition.unit]


def filter_failure(view: View) -> Cause | None:
    """Return the cause if groups cannot be filtered, else None."""
    if view.unfilterable:
        return FilterUnknown(view.unfilterable)
    return FilterFailing(len(view.stuck), next(iter(view.stuck.values()))) if view.stuck else None


def missing_first(view: View) -> int:
    """Return how many groups the first batch lacks; 0 for later batches."""
    return max(0, view.definition.min_first - len(view.pool)) if view.position.cut == 0 else 0


def lost_version(view: View, groups: Iterable[Group]) -> VersionLost | None:
    """Return the cause if a version after the newest published one generated tokens of these groups, else None.

    Redis lost the publication, for example in a power loss, after engines had loaded it. The trainer's next publication
    abandons the version and its groups; until then they cannot be trained.
    """
    newest = max((group.newest for group in groups), default=-1)
    model = view.definition.model
    return VersionLost(model, newest, view.clock, view.name) if model and newest > view.clock else None


def data_used_up(view: View) -> DataUsedUp:
    """Return the cause of a wait after the end of the data."""
    return DataUsedUp(holdings(view), view.definition.size, view.definition.unit)


def missing_groups(view: View, running: int) -> GroupsMissing:
    """Return the cause of a wait for more groups."""
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
    """Return the cause if payload servers do not answer, with the number of groups on them; else None."""
    held = sum(bool(away.keys() & set(group.away)) for group in groups)
    errors = "; ".join(f"{name}: {one.why.rstrip('.')}" for name, one in sorted(away.items()))
    return PayloadServersAway(tuple(sorted(away)), held, errors) if away else None
