"""Why the buffer will not cut, in words: every sentence ends a wait with a name on it (I8).

The limit on admission is the gate (T3, ``places`` of the Lua helpers); the limits on cutting are the batch size, the
groups wanted before the first batch, the bound (T4, in the decision) and filters that cannot be asked.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from buffer.group import Group
from buffer.payload_servers import Away
from buffer.subscription import Subscription
from buffer.view import View
from penstock.config.subscription import Unit
from penstock.protocol.records.disposal import Disposal


def holdings(view: View | Subscription) -> int:
    """Unused groups of a subscription in the unit of its batch size."""
    pool = view.pool
    return {Unit.GROUPS: len(pool), Unit.SAMPLES: pool.samples, Unit.TOKENS: pool.tokens}[view.definition.unit]


def held_up(view: View) -> str:
    """Why nothing is cut whatever is ready; '' when nothing holds it up."""
    if view.unfilterable:
        return f"{view.unfilterable}: add it there and start the buffer again, or define the subscription without it"
    if view.stuck:
        why = next(iter(view.stuck.values()))
        return (
            f"a filter that can be asked: {why} ({len(view.stuck)} groups wait for it; on_filter_error is stop): "
            "correct it and start the buffer again"
        )
    return ""


def missing_first(view: View) -> int:
    """Groups that the first batch waits for; 0 when there are enough, and for all but the first."""
    return max(0, view.definition.min_first - len(view.pool)) if view.position.cut == 0 else 0


def too_early(view: View, missing: int) -> str:
    """Why the first batch is not cut yet."""
    return f"{missing} more groups before the first batch ({len(view.pool)} are ready)"


def unknown_version(view: View, groups: Iterable[Group]) -> str:
    """Groups that were drawn with a version after the last one; '' where there are none.

    Redis lost its publication, as after a power loss, and engines had it. The trainer's next publication gives such
    versions up, and their groups with them; no trainer could take them before.
    """
    newest = max((group.newest for group in groups), default=-1)
    model = view.definition.model
    if not model or newest <= view.clock:
        return ""
    return (
        f"the next publication of model {model}: groups hold version {newest}, which Redis lost ({view.clock} is known)"
    )


def over(view: View) -> str:
    """The data has ended."""
    left = f"{holdings(view)} of {view.definition.size} {view.definition.unit} are left"
    return f"more data than there is: data.epochs are over, nothing is under way, and {left}"


def short(view: View, running: int) -> str:
    """Too few groups are ready."""
    definition, pool = view.definition, view.pool
    have, size, unit = holdings(view), definition.size, definition.unit
    jobs = "" if unit is Unit.GROUPS else " jobs"
    words = [f"{have} of {size} are ready", f"{running}{jobs} are queued or running"]
    if view.rejects:
        words.append(f"{len(view.rejects)} rejects are held back")
    if dropped := dropped_words(view.position.dropped):
        words.append(f"dropped so far: {dropped}")
    full = definition.keep_groups and len(pool) >= definition.keep_groups
    if full or (definition.keep_bytes and pool.num_bytes >= definition.keep_bytes):
        words.append("it can never be cut, since no more may be held for it: raise keep_groups and keep_bytes")
    missing = f"{size - have} more {unit}"
    if have >= size:
        missing = f"more groups, for samples in a whole multiple of {definition.multiple}"
    return f"{missing} ({', '.join(words)})"


def held_for_servers(away: Mapping[str, Away], groups: Iterable[Group]) -> str:
    """Payload servers that do not answer, and what is held back for that; '' where all do."""
    held = Counter(server for group in groups for server in group.away)
    return "; ".join(
        f"payload server {name} to answer: {held[name]} groups are held back ({one.why.rstrip('.')}); start it again, "
        f"or give it up with `penstock payloads lose {name}`"
        for name, one in sorted(away.items())
    )


def with_drops(view: View, why: str) -> str:
    """What is waited for, and what was dropped before it, where anything was."""
    dropped = dropped_words(view.position.dropped)
    return f"{why} (dropped so far: {dropped})" if dropped else why


#: What reasons of the ledger mean where the word alone does not say it.
_MEANINGS: dict[str, str] = {
    Disposal.NO_LOSS: "no_loss (not one of their tokens bears loss)",
    "filter/no_loss": "filter/no_loss (not one of their tokens bears loss)",
    Disposal.PAYLOAD_LOST: "payload_lost (nothing is left of their payloads)",
}


def dropped_words(dropped: Mapping[str, int], most: int = 4) -> str:
    """The ledger of drops, largest first: ``filter/zero_std_0.0 12, stale 3``; '' where nothing was dropped."""
    largest = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{_MEANINGS.get(reason, reason)} {count}" for reason, count in largest[:most]]
    if more := sum(count for _, count in largest[most:]):
        words.append(f"others {more}")
    return ", ".join(words)
