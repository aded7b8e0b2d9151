"""Verbs of operators at the command line, and of clients that collect results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.errors import ConfigError, RecordingLost
from penstock.names import LANES, new_token
from penstock.records.codec import name_shown
from penstock.records.disposal import CODES
from penstock.records.keys import Keys
from penstock.redis.call import Call, Value, run, script, text, version_field
from penstock.redis.commands import Client


@dataclass(frozen=True, slots=True)
class Recording:
    """Proof of the right to record: sent with the verbs of a recorder."""

    epoch: int
    token: str


def record(keys: Keys, token: str, *, lease_ms: int, backlog: int, patience_ms: int, newest: int = 0) -> Call[int]:
    """Take or renew the right to record the history: the epoch, or 0 when another has it.

    The first call enables the run's history: its groups wait to be recorded before they are swept, at most
    ``backlog`` of them, and at most ``patience_ms`` while no recorder is running.

    Args:
        newest: epoch of the newest existing files, 0: none. A new epoch is later: Redis may have lost some,
            and of two rows of one sample that of the later epoch is used.
    """
    args: list[Value] = [keys.prefix, token, lease_ms, backlog, patience_ms, newest]
    return Call(script("record"), [keys.recorder, keys.history], args, int)


def recorded(keys: Keys, recording: Recording, jobs: Iterable[str | bytes]) -> Call[int]:
    """Report that the rows of these groups are on disk; return how many groups waited for that."""

    def parse(answer: Any) -> int:
        if answer == -1:
            raise RecordingLost("Another recorder writes the history; this one stops.")
        return int(answer)

    names = [keys.recorder, keys.unrecorded, keys.retiring]
    return Call(script("recorded"), names, [keys.prefix, recording.epoch, recording.token, *jobs], parse)


def stop_recording(keys: Keys, recording: Recording) -> Call[bool]:
    """Release the right to record."""
    return Call(script("resign"), [keys.recorder], [recording.epoch, recording.token], bool)


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Add a payload server, or change its state, in a new revision of the directory; 0: nothing was changed."""
    return Call(script("server"), [keys.servers], [keys.prefix, name, record, int(only_new), new_token()], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Write a small record in one of the hashes workers, trainers or waits; an empty one deletes it."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


def check_schema(keys: Keys) -> Call[None]:
    """Check that the run's records are of this penstock's schema, or the run has not begun. Reads only.

    Raises:
        ConfigError: they are of another schema, of an unreadable one, or from before schemas existed.
    """
    return Call(script("schema"), [keys.schema], [keys.prefix], partial(_refuse_another, keys))


def ensure_lanes(client: Client, keys: Keys) -> None:
    """Create the job streams and their consumer group if they are missing, in a full Redis too. One round trip.

    Raises:
        ConfigError: the run is of another schema, or of an unreadable one; nothing was changed.
    """
    names = [keys.jobs(lane) for lane in LANES]
    run(client, Call(script("lanes"), names, [keys.prefix], partial(_refuse_another, keys)))


def _refuse_another(keys: Keys, answer: Any) -> None:
    found, ours = map(int, answer)
    if found < 0:
        raise ConfigError(
            f"The schema of the records of run {keys.run} cannot be read: {keys.schema} in Redis is no number. Go on "
            f"with the release that began the run, or begin anew (--fresh, or another --run)."
        )
    if found != ours:
        noted = f"schema {found}" if found else "no schema"
        raise ConfigError(
            f"The records of run {keys.run} are of {noted}, and this penstock's of schema {ours}: go on with "
            "the release that began the run, or begin anew (--fresh, or another --run)."
        )


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
