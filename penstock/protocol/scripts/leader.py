"""Verbs of the buffer's leader. Those that take a ``Leadership`` raise LeadershipLost if it is lost."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import LeadershipLost
from penstock.names import LANES, Lane
from penstock.records.disposal import CODES, Disposal
from penstock.records.keys import Keys
from penstock.redis.call import Call, Value, script, text, texts, version_field

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Leadership:
    """Proof of leadership: sent with every verb of the leader."""

    epoch: int
    token: str


def _call(
    verb: str, keys: Keys, lead: Leadership, names: Sequence[str], args: Sequence[Value], parse: Callable[[Any], _T]
) -> Call[_T]:
    """Make a call that only the leader may send: to others it answers -1, without changes."""

    def read(answer: Any) -> _T:
        if answer == -1:
            raise LeadershipLost(
                "The lease of this buffer ran out, or another one leads; it changes nothing until it leads again."
            )
        return parse(answer)

    return Call(script(verb), [keys.leader, *names], [keys.prefix, lead.epoch, lead.token, *args], read)


def lead(keys: Keys, token: str, lease_ms: int) -> Call[int]:
    """Take or renew the leadership: the epoch, or 0 when another leads."""
    return Call(script("lead"), [keys.leader, keys.epoch], [keys.prefix, token, lease_ms], int)


def resign(keys: Keys, lead: Leadership) -> Call[bool]:
    return Call(script("resign"), [keys.leader], [lead.epoch, lead.token], bool)


def keep(
    keys: Keys,
    lead: Leadership,
    kept: Iterable[tuple[str, int]],
    lost: Mapping[str, Iterable[int]] | None = None,
    shares: Mapping[str, int] | None = None,
) -> Call[int]:
    """Record that payloads of these groups (job, n) are permanent, except k in ``lost``; count those still ready.

    Args:
        shares: job -> share of its right answers (``share_byte``), of groups that count for their prompts. A
            group counts once, however often this is sent.
    """
    gone, counted = lost or {}, shares or {}
    flat: list[Value] = [
        part for job, n in kept for part in (job, n, ",".join(map(str, gone.get(job, ()))), counted.get(job, 0))
    ]
    return _call("keep", keys, lead, [], flat, int)


def persist(payload_keys: Sequence[str]) -> Call[list[bool]]:
    """Make committed payloads permanent, on the server that has them; False for a missing one."""
    return Call(script("persist"), payload_keys, [], lambda answer: [bool(v) for v in answer])


@dataclass(frozen=True, slots=True)
class Skipped:
    """Outcome of skip: ``skipped``, or ``subs`` | ``moved``; places skipped so far."""

    outcome: str
    skipped: int


def skip(keys: Keys, lead: Leadership, sub: str, *, revision: int, place: int, places: int) -> Call[Skipped]:
    """Skip ``places`` of the order of admission from ``place`` on, which are empty now."""
    names = [keys.subs, keys.sub(sub)]
    return _call("skip", keys, lead, names, [revision, place, places], lambda a: Skipped(text(a[0]), int(a[1])))


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """Outcome of cut: cut, already, subs, order, clock; or ``group`` with the job and the reason."""

    outcome: str
    job: str = ""
    why: str = ""


def cut(
    keys: Keys,
    lead: Leadership,
    sub: str,
    *,
    revision: int,
    n: int,
    manifest: bytes,
    digest: str,
    consumes: int,
    model: str,
    version: int,
    oldest_allowed: int,
    jobs: Sequence[str],
    gb: int | None = None,
    of_use: str = "",
    bearing: Sequence[str] = (),
) -> Call[CutAnswer]:
    """Create batch ``n`` of a subscription, if everything it was planned on still holds.

    Args:
        gb: groups that one of its versions consumes from now on, if not known in advance.
        of_use: record for each group beside the batch, in a run with a history (``records/sample.py``).
        bearing: for each group its tokens that bear loss, ``K:TOKENS,...``; empty: none do.
    """

    def parse(answer: Any) -> CutAnswer:
        return CutAnswer(*texts(answer)) if text(answer[0]) == "group" else CutAnswer(text(answer[0]))

    field = version_field(model) if model else ""
    head: list[Value] = [sub, revision, n, manifest, digest, consumes]
    args = [*head, field, version, oldest_allowed, "" if gb is None else gb, of_use, ";".join(bearing), *jobs]
    return _call("cut", keys, lead, [keys.subs, keys.sub(sub), keys.batches(sub), keys.clock], args, parse)


def dispose(
    keys: Keys,
    lead: Leadership,
    sub: str,
    reason: Disposal,
    jobs: Sequence[str],
    aged: Sequence[tuple[int, int]] = (),
    staleness: Sequence[int] = (),
) -> Call[int]:
    """Dispose of these groups for a subscription; their places at the gate are free. Returns their number.

    Args:
        aged: (samples, generated tokens) of each, if they are stale; empty: for another reason.
        staleness: of each, in versions; empty: 0.
    """
    sizes, lags = aged or [(0, 0)] * len(jobs), staleness or [0] * len(jobs)
    groups = [value for job, size, lag in zip(jobs, sizes, lags, strict=True) for value in (job, *size, lag)]
    return _call("dispose", keys, lead, [keys.sub(sub)], [sub, reason, reason.code, *groups], int)


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of a subscription's filters for one group; groups that are simply kept are not recorded."""

    job: str
    #: Why it is dropped, a short word; '' if it is kept although a filter raised.
    reason: str
    raised: bool
    num_samples: int
    #: Sum over its samples.
    reward: float


def judge(keys: Keys, lead: Leadership, sub: str, groups: Iterable[Judged]) -> Call[int]:
    """Drop groups that filters rejected, with a ledger by reason; return their number."""
    args: list[Value] = [sub, Disposal.FILTERED.code]
    for one in groups:
        args += [one.job, one.reason, int(not one.reason), int(one.raised), one.num_samples, repr(one.reward)]
    return _call("judge", keys, lead, [keys.sub(sub)], args, int)


@dataclass(frozen=True, slots=True)
class Late:
    """A begun group that was first leased long ago."""

    job: str
    committed: int
    wanted: int
    age_s: float


def late(keys: Keys, age_ms: int, most: int) -> Call[list[Late]]:
    """List up to ``most`` begun train groups whose first lease is at least ``age_ms`` old. Reads only."""

    def parse(answer: Any) -> list[Late]:
        return [Late(text(job), int(c), int(n), int(age) / 1000) for job, c, n, age in answer]

    return Call(script("late"), [keys.inflight], [keys.prefix, age_ms, most], parse)


def shorten(keys: Keys, lead: Leadership, job: str, fewest: int = 1) -> Call[int]:
    """Make a begun group ready with its committed samples; return their number, 0 if it is below ``fewest``."""
    return _call("shorten", keys, lead, [keys.group(job), keys.ready], [job, fewest], int)


def drop(keys: Keys, lead: Leadership, job: str) -> Call[int]:
    """Drop a begun group that took too long; return 0 if it is complete, dead or deleted."""
    return _call("drop", keys, lead, [keys.group(job)], [job], int)


def rolled_back(keys: Keys, seen: Mapping[str, int]) -> Call[dict[str, int]]:
    """Record by how much counters decreased when Redis lost acknowledged writes; any buffer may send it.

    Args:
        seen: counter -> the largest value that the caller has seen, with what was reported of it by then.

        Returns losses that were not reported yet, by counter.
    """
    flat: list[Value] = [part for pair in seen.items() for part in pair]

    def parse(answer: list[Any]) -> dict[str, int]:
        return {name.decode(): int(count) for name, count in zip(answer[::2], answer[1::2], strict=True)}

    return Call(script("rolled_back"), [keys.counters], [keys.prefix, *flat], parse)


def seal(
    keys: Keys,
    lead: Leadership,
    *,
    revision: int,
    subs: Sequence[str],
    jobs: Sequence[str],
    evict: Collection[str] = (),
) -> Call[list[str] | None]:
    """Retire groups that every subscription is done with; return them, or None if the subscriptions changed.

    ``evict``: subscriptions that may lose committed batches not covered by a checkpoint.
    """

    def parse(answer: Any) -> list[str] | None:
        return texts(answer) if isinstance(answer, list) else None

    flags = "".join("1" if sub in evict else "0" for sub in subs)
    names = [keys.subs, keys.ready, *map(keys.sub, subs)]
    return _call("seal", keys, lead, names, [revision, len(subs), flags, CODES, *subs, *jobs], parse)


@dataclass(frozen=True, slots=True)
class Parked:
    """Outcome of park: ``parked`` with the groups given back to a pool, or the reason why not."""

    outcome: str
    given: int = 0


def park(keys: Keys, lead: Leadership, sub: str, *, revision: int, absent_ms: int) -> Call[Parked]:
    """Park a subscription whose owner has been gone for longer than ``absent_ms``: it blocks no others any more."""

    def parse(answer: Any) -> Parked:
        return Parked(text(answer[0]), *(int(v) for v in answer[1:]))

    names = [keys.subs, keys.sub(sub), keys.batches(sub), keys.owner(sub)]
    return _call("park", keys, lead, names, [revision, sub, absent_ms], parse)


def grant(keys: Keys, lead: Leadership, sub: str, groups: int, completed: int, counted: Sequence[str]) -> Call[int]:
    """Grant ``groups`` to the next batch of ``sub``, if the gate of ``counted`` is closed and nothing is in flight.

    ``completed``: completed groups of the run when ``groups`` was computed. Returns the number of granted groups.
    """
    names = [keys.subs, keys.sub(sub), keys.delayed, keys.counters]
    lanes = [keys.jobs(lane) for lane in (Lane.TRAIN, Lane.RESUME, Lane.SUSPECT)]
    return _call("grant", keys, lead, [*names, *lanes, *map(keys.sub, counted)], [groups, completed], int)


def conclude(
    keys: Keys, lead: Leadership, sub: str, *, n: int, end: int, completed: int, lanes: Iterable[str]
) -> Call[int]:
    """Record that batch ``n`` of ``sub`` will not be cut: the data ended at ``end``, and ``lanes`` are idle.

    ``completed``: completed groups of the run at that time. Returns 1, or 0 if something changed meanwhile.
    """
    names = [keys.source, keys.sub(sub), keys.delayed, keys.counters, *map(keys.jobs, lanes)]
    return _call("conclude", keys, lead, names, [n, end, completed], int)


def sweep(keys: Keys, lead: Leadership, groups: Iterable[tuple[str, int]]) -> Call[int]:
    """Delete sealed groups (job, n) whose payloads are unlinked; return their number."""
    flat: list[Value] = [part for pair in groups for part in pair]
    return _call("sweep", keys, lead, [], flat, int)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Groups that wait for the recorder, groups discarded by this call, and since the run began."""

    waiting: int
    given_up: int
    total: int
    #: Seconds since a recorder was running; 0: one is, -1: the run keeps no history.
    away_s: float

    @property
    def on(self) -> bool:
        """Whether the run keeps a history."""
        return self.away_s >= 0


def unrecorded(keys: Keys, lead: Leadership, most: int) -> Call[Backlog]:
    """Count the groups that wait for the recorder; discard at most ``most`` that wait in vain."""

    def parse(answer: Any) -> Backlog:
        waiting, given_up, total, away = (int(value) for value in answer)
        return Backlog(waiting, given_up, total, away / 1000 if away > 0 else away)

    names = [keys.recorder, keys.history, keys.unrecorded, keys.retiring]
    return _call("unrecorded", keys, lead, names, [most], parse)


def tidy(keys: Keys, records: str, stale: Iterable[tuple[bytes, bytes]], *, consumers: bool = False) -> Call[int]:
    """Remove (field, record) pairs of a hash as they were read; with ``consumers``, those of dead workers too."""
    flat: list[Value] = [part for pair in stale for part in pair]
    lanes = [keys.jobs(lane) for lane in LANES] if consumers else []
    return Call(script("tidy"), [records, *lanes], [keys.prefix, *flat], int)


def due(keys: Keys, most: int = 100) -> Call[int]:
    """Queue delayed jobs whose wait is over."""
    return Call(script("due"), [keys.delayed, keys.bodies], [keys.prefix, most], int)


def reclaim(
    keys: Keys, lane: str, token: str, lease_ms: int, most: int = 100
) -> Call[str | list[tuple[str, str, str]]]:
    """Take over leases that ran out: (job, worker, new lane); or why it is not the caller's turn."""

    def parse(answer: Any) -> str | list[tuple[str, str, str]]:
        if isinstance(answer, (bytes, str)):
            return text(answer)
        return [(text(a), text(b), text(c)) for a, b, c in answer]

    return Call(script("reclaim"), [keys.reclaimer, keys.jobs(lane)], [keys.prefix, lane, token, lease_ms, most], parse)
