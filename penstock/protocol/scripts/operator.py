"""Verbs of operators at the command line, and of clients that collect results."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.protocol.records.disposal import CODES
from penstock.protocol.records.small_maps import name_shown
from penstock.redis.call import Call, script, text, version_field


def requeue(keys: Keys, job: str, model: str) -> Call[bool]:
    """Requeue a dead job. False: it is not dead."""
    return Call(
        script("requeue"), [keys.group(job), keys.dead, keys.clock], [keys.prefix, job, version_field(model)], bool
    )


def pause(keys: Keys, lane: str, record: bytes) -> Call[bool]:
    """Pause a lane, or resume it (an empty record). False: it was in that state already."""
    return Call(script("pause"), [keys.paused, keys.paused_by], [keys.prefix, lane, record], bool)


#: Answer of cancel if the job stays, since a trainer may still read a batch that holds it.
HELD_BY_BATCH = "cut"


def cancel(keys: Keys, job: str, subs: Sequence[str], only: str = "") -> Call[str]:
    """Cancel a live job; the ``JobState`` it was in, ``HELD_BY_BATCH``, or '' (the job does not exist).

    Args:
        only: a ``JobState``: a job in another state is not cancelled.
    """
    names = [keys.group(job), keys.dead, keys.ready, keys.subs, *map(keys.sub, subs)]
    return Call(script("cancel"), names, [keys.prefix, job, only, CODES, *subs], text)


def collect(keys: Keys, job: str, lane: str) -> Call[str]:
    """Retire a ready group of a lane without subscriptions: retired, '' (gone), subscribed, or the state it is in."""
    return Call(script("collect"), [keys.group(job), keys.ready, keys.subs], [keys.prefix, job, lane], text)


def ready_groups(keys: Keys) -> Call[dict[str, int]]:
    """Count the groups of each lane that a batch may still take; lanes without any are left out. Reads only."""
    return Call(script("ready_groups"), [keys.ready, keys.subs], [keys.prefix], _counts)


def unsubscribe(keys: Keys, sub: str) -> Call[bool]:
    """Drop a subscription with its batches, for good: its name cannot be used again."""
    names = [keys.subs, keys.sub(sub), keys.batches(sub), keys.owner(sub), keys.orders(sub)]
    return Call(script("unsubscribe"), names, [keys.prefix, sub], bool)


def check_group(keys: Keys, job: str) -> Call[str]:
    """Check a group's state; return what is wrong, or ''."""
    names = [keys.group(job), keys.meta(job), keys.ready, keys.delayed, keys.dead, keys.inflight, keys.retiring]
    return Call(script("check_group"), names, [keys.prefix, job], text)


@dataclass(frozen=True, slots=True)
class Recount:
    """I1 in one instant: ``admitted`` must equal the sum of the others."""

    admitted: int
    lanes: int
    delayed: int
    dead: int
    #: Complete groups that are not retired, whether a batch may still take them or not.
    kept: int
    retired: int
    evicted: int
    dropped: int
    cancelled: int

    @property
    def difference(self) -> int:
        parts = self.lanes + self.delayed + self.dead + self.kept
        return self.admitted - parts - self.retired - self.evicted - self.dropped - self.cancelled


def recount_tokens(keys: Keys) -> Call[tuple[dict[str, int], dict[str, int]]]:
    """Read for I10, in one instant, the fields of the ledger, and the tokens held by live groups of each home lane.

    Takes Redis some microseconds for each live group.
    """
    names = [keys.tokens, keys.delayed, keys.ready, *map(keys.jobs, LANES)]
    return Call(script("recount_tokens"), names, [keys.prefix], lambda answer: (_counts(answer[0]), _counts(answer[1])))


def _counts(flat: Sequence[bytes]) -> dict[str, int]:
    return {name_shown(name): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def recount(keys: Keys) -> Call[Recount]:
    names = [keys.counters, keys.delayed, keys.dead, keys.ready, *map(keys.jobs, LANES)]
    return Call(script("recount"), names, [], lambda answer: Recount(*(int(v) for v in answer)))
