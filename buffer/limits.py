"""Why the buffer will not cut, in words: every sentence ends a wait with a name on it (I8).

The limit on admission is the gate (T3, ``places`` of the Lua helpers); the limits on cutting are the batch size, the
groups wanted before the first batch, the bound (T4, in the cutter) and filters that cannot be asked.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from buffer.group import Group
from buffer.payload_servers import Away
from buffer.subscription import Subscription
from penstock.protocol.keys import Keys
from penstock.redis.control import Client


def gates(subs: Mapping[str, Subscription]) -> list[list[str]]:
    """Names of the subscriptions that hold the gate, with one of a pool all of its members."""
    accounts: dict[str, list[str]] = {}
    for name, sub in sorted(subs.items()):
        accounts.setdefault(sub.account, []).append(name)
    driven = {sub.account for sub in subs.values() if sub.definition.driving and not sub.position.parked}
    return [names for account, names in accounts.items() if account in driven]


def holdings(sub: Subscription) -> int:
    """Unused groups of a subscription in the unit of its batch size."""
    pool = sub.pool
    return {"groups": len(pool), "samples": pool.samples, "tokens": pool.tokens}[sub.definition.unit]


def held_up(sub: Subscription) -> str:
    """Why nothing is cut whatever is ready; '' when nothing holds it up."""
    if sub.unfilterable:
        return f"{sub.unfilterable}: add it there and start the buffer again, or define the subscription without it"
    if sub.stuck:
        why = next(iter(sub.stuck.values()))
        return (
            f"a filter that can be asked: {why} ({len(sub.stuck)} groups wait for it; on_filter_error is stop): "
            "correct it and start the buffer again"
        )
    return ""


def too_early(sub: Subscription) -> str:
    """Why the first batch is not cut yet; '' when nothing holds it up, or for all but the first."""
    ready = len(sub.pool)
    if sub.position.cut == 0 and ready < sub.definition.min_first:
        return f"{sub.definition.min_first - ready} more groups before the first batch ({ready} are ready)"
    return ""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the data, once all before it is admitted."""

    #: Position of the train prompts behind the last one.
    position: int
    #: What is left for a batch is trained, though it is smaller than others.
    train: bool
    #: Groups that the run had completed when nothing was under way any more.
    completed: int = 0


def end_of_data(client: Client, keys: Keys) -> End | None:
    """Where the data ended; None while there is more, or no end at all. Blocks for a round trip."""
    position, end, last_batch = client.hmget(keys.source, "train", "end", "last_batch")
    if end is None or int(position or 0) < int(end):
        return None
    return End(int(end), last_batch == b"train")


def over(sub: Subscription) -> str:
    """The data has ended."""
    left = f"{holdings(sub)} of {sub.definition.size} {sub.definition.unit} are left"
    return f"more data than there is: data.epochs are over, nothing is under way, and {left}"


def lanes(sub: Subscription) -> tuple[str, ...]:
    """Lanes in which a job of this subscription may be."""
    return (*sub.definition.lanes, "resume", "suspect")


def under_way(client: Client, keys: Keys, sub: Subscription) -> int:
    """Jobs that are queued, running or to be tried again, of this subscription's lanes or without a lane of theirs."""
    pipe = client.pipeline(transaction=False)
    for lane in lanes(sub):
        pipe.xlen(keys.jobs(lane))
    pipe.zcard(keys.delayed)
    return sum(int(count) for count in pipe.execute())


def short(sub: Subscription, running: int) -> str:
    """Too few groups are ready."""
    definition, pool = sub.definition, sub.pool
    have, size, unit = holdings(sub), definition.size, definition.unit
    jobs = "" if unit == "groups" else " jobs"
    words = [f"{have} of {size} are ready", f"{running}{jobs} are queued or running"]
    if sub.held:
        words.append(f"{len(sub.held)} rejects are held back")
    if dropped := dropped_words(sub.position.dropped):
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


def with_drops(sub: Subscription, why: str) -> str:
    """What is waited for, and what was dropped before it, where anything was."""
    dropped = dropped_words(sub.position.dropped)
    return f"{why} (dropped so far: {dropped})" if dropped else why


#: What reasons of the ledger mean where the word alone does not say it.
_MEANINGS = {
    "no_loss": "no_loss (not one of their tokens bears loss)",
    "filter/no_loss": "filter/no_loss (not one of their tokens bears loss)",
    "payload_lost": "payload_lost (nothing is left of their payloads)",
}


def dropped_words(dropped: Mapping[str, int], most: int = 4) -> str:
    """The ledger of drops, largest first: ``filter/zero_std_0.0 12, stale 3``; '' where nothing was dropped."""
    largest = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{_MEANINGS.get(reason, reason)} {count}" for reason, count in largest[:most]]
    if more := sum(count for _, count in largest[most:]):
        words.append(f"others {more}")
    return ", ".join(words)
