"""The verbs of the protocol: one typed function per Lua file, for the sync and the async client alike.

A function here builds a ``Call`` (what to send and how to read the answer) and touches no network; ``run`` and
``run_async`` send it. Every verb may be sent again after a lost reply: it is idempotent, or its guard refuses the
second time (protocol of leases, tokens, owners and revisions).
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from penstock.errors import ConfigError, PublishError, QueueFull
from penstock.keys import LANES, Keys
from penstock.messages import Job

T = TypeVar("T")
Value = str | bytes | int | float

#: Lanes in the order in which reclaim looks at them.
ALL_LANES = LANES


@dataclass(frozen=True, slots=True)
class Script:
    """Text and digest of one Lua verb."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Load ``lua/NAME.lua`` with the common helpers before it."""
    folder = files("penstock") / "lua"
    text = (folder / "_common.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One verb to be sent, and how its answer is read."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Value]
    parse: Callable[[Any], T]


def run(client: "redis.Redis", call: Call[T]) -> T:
    """Send a verb. Blocks for one round trip. Raises redis' connection errors and QueueFull."""
    try:
        try:
            answer = client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            answer = client.eval(call.script.text, len(call.keys), *call.keys, *call.args)
    except ResponseError as exc:
        if is_demoted(exc):
            client.connection_pool.disconnect(inuse_connections=False)
        raise translate(exc, call.script.name) from exc
    return call.parse(answer)


async def run_async(client: "redis.asyncio.Redis", call: Call[T]) -> T:
    """Send a verb from asyncio; as ``run``."""
    try:
        try:
            answer = await client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            answer = await client.eval(call.script.text, len(call.keys), *call.keys, *call.args)
    except ResponseError as exc:
        if is_demoted(exc):
            await client.connection_pool.disconnect(inuse_connections=False)
        raise translate(exc, call.script.name) from exc
    return call.parse(answer)


def is_demoted(exc: object) -> bool:
    """True when the server has become a replica. Redis 6.2 says so of a script in the middle of another error."""
    return isinstance(exc, ResponseError) and "READONLY" in str(exc)


def translate(exc: Exception, verb: str) -> Exception:
    """A full Redis is an error of its own, one that was demoted a passing one; any other answer stays what it is."""
    if isinstance(exc, OutOfMemoryError) or "OOM" in str(exc):
        return QueueFull(
            f"Redis has no memory left for '{verb}': raise its maxmemory, add payload servers or let trainers catch up."
        )
    return ReadOnlyError(str(exc)) if is_demoted(exc) else exc


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(values: Iterable[Any]) -> list[str]:
    return [_text(value) for value in values]


def version_field(model: str) -> str:
    """Field of the clock that holds a model's version."""
    return f"version:{model}"


# --- producer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admission:
    """Outcome of admit: ``ok``, ``moved`` (another producer was here), ``subs`` (read them anew), ``closed`` (gate)."""

    outcome: str
    admitted: int = 0
    position: int = 0
    #: The subscription that has no room, where the gate is closed; '' where there is none.
    sub: str = ""


def admit(
    keys: Keys,
    jobs: Sequence[tuple[Job, bytes]],
    *,
    lane: str,
    source: str,
    position: int,
    model: str,
    gate: tuple[int, Sequence[str | Sequence[str]]] | None,
    cohorts: bool = False,
) -> Call[Admission]:
    """Admit jobs in order, as many as the gate lets in.

    Args:
        jobs: jobs of one lane and their records.
        source: name of the position that is moved, by one per job admitted or skipped as done.
        position: where the caller believes it stands.
        gate: (revision of subs, driving subscriptions; for a pool all of its members as one entry), or None for lanes
            that no gate holds (eval, score).
        cohorts: keep the order of admission, because a subscription of this lane cuts by cohort.
    """
    gates = [[one] if isinstance(one, str) else list(one) for one in gate[1]] if gate else []
    head: list[Value] = [keys.prefix, lane, source, position, gate[0] if gate else -1, version_field(model)]
    args: list[Value] = [*head, int(cohorts), _numbers(gates)]
    for job, body in jobs:
        args += [job.id, job.n, body]

    def parse(answer: Any) -> Admission:
        admitted, position, tightest = (*(int(v) for v in answer[1:]), 0, 0, 0)[:3]
        return Admission(_text(answer[0]), admitted, position, gates[tightest - 1][0] if tightest else "")

    subs = [keys.sub(name) for names in gates for name in names]
    return Call(script("admit"), [keys.source, keys.subs, keys.clock, *subs], args, parse)


def swap(keys: Keys, field: str, read: int, number: int) -> Call[int]:
    """Move a number of the source from ``read`` to ``number``, unless it moved meanwhile; the number that is there."""
    return Call(script("swap"), [keys.source], [field, read, number], int)


# --- worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to a job."""

    job: Job
    lane: str
    token: str
    not_before: int
    attempts: int
    crashes: int
    #: k of samples that an earlier lease committed.
    committed: frozenset[int]


@dataclass(frozen=True, slots=True)
class RawLease:
    """A lease whose job record is not decoded yet, so that a broken record can be buried by name."""

    job: str
    lane: str
    token: str
    not_before: int
    body: bytes
    attempts: int
    crashes: int
    committed: frozenset[int]


def lease(
    keys: Keys,
    worker: str,
    base: str,
    *,
    most: int,
    version: int,
    suspects: int = 1,
    lanes: Sequence[str] = LANES,
) -> Call[list[RawLease]]:
    """Take up to ``most`` jobs that an engine holding ``version`` may start, in the order of ``lanes``."""

    def parse(answer: Any) -> list[RawLease]:
        return [
            RawLease(
                job=_text(row[1]),
                lane=_text(row[0]),
                token=_text(row[2]),
                not_before=int(row[3]),
                body=bytes(row[4]),
                attempts=int(row[5]),
                crashes=int(row[6]),
                committed=frozenset(int(k) for k in row[7]),
            )
            for row in answer
        ]

    args: list[Value] = [keys.prefix, worker, base, most, version, suspects, *lanes]
    return Call(script("lease"), [keys.inflight, keys.paused, *map(keys.jobs, lanes)], args, parse)


def renew(keys: Keys, worker: str, leases: Iterable[tuple[str, str]]) -> Call[list[str]]:
    """Renew (job, token) leases; returns the jobs whose lease is lost."""
    flat = [part for pair in leases for part in pair]
    return Call(script("renew"), [keys.counters], [keys.prefix, worker, *flat], _texts)


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of commit: ``ok``, ``ready`` (the group is complete) or ``lost`` (the lease is another's)."""

    outcome: str
    new: int
    again: int
    taken: int


def commit(keys: Keys, job: str, token: str, samples: Iterable[tuple[int, int, bytes]]) -> Call[Committed]:
    """Commit samples of one job: (k, oldest generated version or -1, SampleMeta record) each."""
    args: list[Value] = [keys.prefix, job, token]
    for k, oldest, record in samples:
        args += [k, oldest, record]

    def parse(answer: Any) -> Committed:
        return Committed(_text(answer[0]), *(int(v) for v in answer[1:]))

    return Call(
        script("commit"), [keys.group(job), keys.meta(job), keys.ready, keys.inflight, keys.samples], args, parse
    )


def checkpoint(keys: Keys, job: str, token: str, k: int, record: bytes, ttl_s: int) -> Call[bool]:
    """Keep a running sample's prefix. False: the lease is lost."""
    return Call(script("checkpoint"), [keys.group(job), keys.partial(f"{job}/{k}")], [token, record, ttl_s], bool)


def extend(keys: Keys, job: str, token: str, k: int, record: bytes, *, before: int, ttl_s: int, most: int) -> Call[str]:
    """Append to a prefix of ``before`` bytes: kept, lost, other (bytes are there), or full (more than ``most``)."""
    args: list[Value] = [token, before, record, ttl_s, most]
    return Call(script("extend"), [keys.group(job), keys.partial(f"{job}/{k}")], args, _text)


def release(keys: Keys, job: str, token: str) -> Call[bool]:
    """Hand a job back without a charge. False: the lease is lost."""
    return Call(script("release"), [keys.group(job)], [keys.prefix, job, token], bool)


def abandon(keys: Keys, lane: str, worker: str, known: Iterable[str]) -> Call[list[str]]:
    """Release what is pending for this worker and not among ``known``."""
    return Call(script("abandon"), [keys.jobs(lane)], [keys.prefix, lane, worker, *known], _texts)


def crash(keys: Keys, job: str, token: str, worker: str, detail: str) -> Call[str]:
    """The engine died under this job. Returns resume, suspect, dead or lost."""
    return Call(script("crash"), [keys.group(job)], [keys.prefix, job, token, worker, detail], _text)


def fail(
    keys: Keys, job: str, token: str, worker: str, *, reason: str, detail: str, max_attempts: int, retry_ms: int
) -> Call[str]:
    """A try failed. Returns delayed, dead or lost. ``max_attempts`` 0 buries at once."""
    args: list[Value] = [keys.prefix, job, token, worker, reason, detail[:65536], max_attempts, retry_ms]
    return Call(script("fail"), [keys.group(job), keys.delayed, keys.bodies], args, _text)


def due(keys: Keys, most: int = 100) -> Call[int]:
    """Queue delayed jobs whose time has come."""
    return Call(script("due"), [keys.delayed, keys.bodies], [keys.prefix, most], int)


def reclaim(
    keys: Keys, lane: str, token: str, lease_ms: int, most: int = 100
) -> Call[str | list[tuple[str, str, str]]]:
    """Take over leases that ran out: (job, worker, where it went); or why it is not the caller's turn."""

    def parse(answer: Any) -> str | list[tuple[str, str, str]]:
        if isinstance(answer, (bytes, str)):
            return _text(answer)
        return [(_text(a), _text(b), _text(c)) for a, b, c in answer]

    return Call(script("reclaim"), [keys.reclaimer, keys.jobs(lane)], [keys.prefix, lane, token, lease_ms, most], parse)


# --- operator ---------------------------------------------------------------------------------------------------


def requeue(keys: Keys, job: str, model: str) -> Call[bool]:
    """Dig a dead job up. False: it is not dead."""
    return Call(
        script("requeue"), [keys.group(job), keys.dead, keys.clock], [keys.prefix, job, version_field(model)], bool
    )


def cancel(keys: Keys, job: str, subs: Sequence[str]) -> Call[str]:
    """Cancel a live job; the state it was in, ``cut`` (it stays: a batch holds it), or '' (nothing to cancel)."""
    names = [keys.group(job), keys.delayed, keys.bodies, keys.dead, keys.ready, keys.inflight]
    return Call(script("cancel"), [*names, *map(keys.sub, subs)], [keys.prefix, job, *subs], _text)


def collect(keys: Keys, job: str, lane: str) -> Call[str]:
    """Retire a ready group of a lane without subscriptions: retired, '' (gone), subscribed, or the state it is in."""
    return Call(script("collect"), [keys.group(job), keys.ready, keys.subs], [keys.prefix, job, lane], _text)


def unsubscribe(keys: Keys, sub: str) -> Call[bool]:
    """Drop a subscription with its batches, for good: its name is not to be had again."""
    return Call(
        script("unsubscribe"), [keys.subs, keys.sub(sub), keys.batches(sub), keys.owner(sub)], [keys.prefix, sub], bool
    )


def check_group(keys: Keys, job: str) -> Call[str]:
    """What is wrong with a group's state, or ''."""
    names = [keys.group(job), keys.meta(job), keys.ready, keys.delayed, keys.dead, keys.inflight, keys.retiring]
    return Call(script("check_group"), names, [keys.prefix, job], _text)


@dataclass(frozen=True, slots=True)
class Recount:
    """I1 in one instant: ``admitted`` must equal the sum of the others."""

    admitted: int
    lanes: int
    delayed: int
    dead: int
    ready: int
    retired: int
    evicted: int
    dropped: int
    cancelled: int

    @property
    def difference(self) -> int:
        parts = self.lanes + self.delayed + self.dead + self.ready
        return self.admitted - parts - self.retired - self.evicted - self.dropped - self.cancelled


def recount(keys: Keys) -> Call[Recount]:
    names = [keys.counters, keys.delayed, keys.dead, keys.ready, *map(keys.jobs, LANES)]
    return Call(script("recount"), names, [], lambda answer: Recount(*(int(v) for v in answer)))


# --- leader of the buffer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leadership:
    """Proof of leading: sent with every verb of the leader."""

    epoch: int
    token: str


def lead(keys: Keys, token: str, lease_ms: int) -> Call[int]:
    """Take or renew the leadership: the epoch, or 0 when another leads."""
    return Call(script("lead"), [keys.leader, keys.epoch], [keys.prefix, token, lease_ms], int)


def resign(keys: Keys, lead: Leadership) -> Call[bool]:
    return Call(script("resign"), [keys.leader], [lead.epoch, lead.token], bool)


def keep(
    keys: Keys, lead: Leadership, kept: Iterable[tuple[str, int]], lost: Mapping[str, Iterable[int]] | None = None
) -> Call[int]:
    """Payloads of these groups (job, n) are permanent, but for k in ``lost``. -1: leadership lost."""
    gone = lost or {}
    flat: list[Value] = [part for job, n in kept for part in (job, n, ",".join(map(str, gone.get(job, ()))))]
    return Call(script("keep"), [keys.leader], [keys.prefix, lead.epoch, lead.token, *flat], int)


def persist(payload_keys: Sequence[str]) -> Call[list[bool]]:
    """Make committed payloads permanent, on the server that has them; False where one is gone."""
    return Call(script("persist"), payload_keys, [], lambda answer: [bool(v) for v in answer])


@dataclass(frozen=True, slots=True)
class Skipped:
    """Outcome of skip: ``skipped``, or ``leader`` | ``subs`` | ``moved``; places skipped so far."""

    outcome: str
    skipped: int


def skip(keys: Keys, lead: Leadership, sub: str, *, revision: int, place: int, places: int) -> Call[Skipped]:
    """Pass over ``places`` of the order of admission from ``place`` on, which hold nothing any more."""
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, revision, place, places]
    names = [keys.leader, keys.subs, keys.sub(sub)]
    return Call(script("skip"), names, args, lambda answer: Skipped(_text(answer[0]), int(answer[1])))


@dataclass(frozen=True, slots=True)
class Cut:
    """Outcome of cut: cut, already, leader, subs, order, clock; or ``group`` with the job and why."""

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
) -> Call[Cut]:
    """Batch ``n`` of a subscription comes to be, if everything it was planned on still holds.

    ``gb``: groups that one of its versions consumes from now on, where that is not known beforehand.
    """

    def parse(answer: Any) -> Cut:
        return Cut(*_texts(answer)) if _text(answer[0]) == "group" else Cut(_text(answer[0]))

    field = version_field(model) if model else ""
    head: list[Value] = [keys.prefix, lead.epoch, lead.token, sub, revision, n, manifest, digest, consumes]
    args = [*head, field, version, oldest_allowed, "" if gb is None else gb, *jobs]
    return Call(script("cut"), [keys.leader, keys.subs, keys.sub(sub), keys.batches(sub), keys.clock], args, parse)


#: Why a subscription will never use a group: reason -> value of its ``u`` field.
DISPOSALS = {
    "stale": -1, "filtered": -2, "rewound": -3, "payload_lost": -4, "before": -5, "quota": -6, "retention": -7,
}  # fmt: skip


def dispose(keys: Keys, lead: Leadership, sub: str, reason: str, jobs: Sequence[str]) -> Call[int]:
    """A subscription gives up these groups unused; their places at the gate are free. -1: leadership lost."""
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, sub, reason, DISPOSALS[reason], *jobs]
    return Call(script("dispose"), [keys.leader, keys.sub(sub)], args, int)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a subscription's filters said of one group; those that simply keep it are not told."""

    job: str
    #: Why it is dropped, a short word; '' where it is kept although a filter raised.
    reason: str
    raised: bool
    num_samples: int
    #: Sum over its samples.
    reward: float


def judge(keys: Keys, lead: Leadership, sub: str, groups: Iterable[Judged]) -> Call[int]:
    """Drop groups that filters rejected, with a ledger by reason; how many were dropped. -1: leadership lost."""
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, sub, DISPOSALS["filtered"]]
    for one in groups:
        args += [one.job, one.reason, int(not one.reason), int(one.raised), one.num_samples, repr(one.reward)]
    return Call(script("judge"), [keys.leader, keys.sub(sub)], args, int)


def room(keys: Keys, gates: Sequence[Sequence[str]]) -> Call[dict[str, tuple[int, int]]]:
    """Places at each gate by its first subscription: (free, all); free ones below 0 are too many.

    ``gates``: driving subscriptions, each with all members of its pool.
    """

    def parse(answer: Any) -> dict[str, tuple[int, int]]:
        return {names[0]: (int(free), int(all_)) for names, (free, all_) in zip(gates, answer, strict=True)}

    subs = [keys.sub(name) for names in gates for name in names]
    return Call(script("room"), [keys.subs, *subs], [keys.prefix, _numbers(gates)], parse)


def _numbers(gates: Sequence[Sequence[str]]) -> str:
    """The number of its gate for every subscription."""
    return ",".join(str(number) for number, names in enumerate(gates, 1) for _ in names)


@dataclass(frozen=True, slots=True)
class Late:
    """A begun group that was first leased long ago."""

    job: str
    committed: int
    wanted: int
    age_s: float


def late(keys: Keys, age_ms: int, most: int) -> Call[list[Late]]:
    """Up to ``most`` begun train groups whose first lease is at least ``age_ms`` old. Reads only."""

    def parse(answer: Any) -> list[Late]:
        return [Late(_text(job), int(c), int(n), int(age) / 1000) for job, c, n, age in answer]

    return Call(script("late"), [keys.inflight], [keys.prefix, age_ms, most], parse)


def close(keys: Keys, lead: Leadership, job: str, fewest: int = 1) -> Call[int]:
    """Make a begun group ready with the samples it has. 0: fewer than ``fewest``; -1: leadership lost."""
    names = [keys.leader, keys.group(job), keys.ready, keys.inflight, keys.samples, keys.delayed, keys.bodies]
    return Call(script("close"), names, [keys.prefix, lead.epoch, lead.token, job, fewest], int)


def expire(keys: Keys, lead: Leadership, job: str) -> Call[int]:
    """Drop a begun group that took too long. 0: it is complete, buried or gone by now; -1: leadership lost."""
    names = [keys.leader, keys.group(job), keys.inflight, keys.delayed, keys.bodies]
    return Call(script("expire"), names, [keys.prefix, lead.epoch, lead.token, job], int)


def rolled_back(keys: Keys, lost: Mapping[str, int]) -> Call[int]:
    """Keep by how much counters went back when Redis forgot acknowledged writes."""
    return Call(script("rolled_back"), [keys.counters], [part for pair in lost.items() for part in pair], int)


def seal(
    keys: Keys,
    lead: Leadership,
    *,
    revision: int,
    subs: Sequence[str],
    jobs: Sequence[str],
    evict: Collection[str] = (),
) -> Call[str | list[str]]:
    """Retire groups that every subscription is done with; the jobs sealed, or ``leader`` | ``subs``.

    ``evict``: subscriptions that may lose what they committed and have no checkpoint past.
    """

    def parse(answer: Any) -> str | list[str]:
        return _text(answer) if isinstance(answer, (bytes, str)) else _texts(answer)

    flags = "".join("1" if sub in evict else "0" for sub in subs)
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, revision, len(subs), flags, *subs, *jobs]
    return Call(script("seal"), [keys.leader, keys.subs, keys.ready, *map(keys.sub, subs)], args, parse)


@dataclass(frozen=True, slots=True)
class Parked:
    """Outcome of park: ``parked`` with the groups given back to a pool, or why not."""

    outcome: str
    given: int = 0


def park(keys: Keys, lead: Leadership, sub: str, *, revision: int, absent_ms: int) -> Call[Parked]:
    """A subscription whose owner has been gone for longer than ``absent_ms`` holds up nobody any more."""
    names = [keys.leader, keys.subs, keys.sub(sub), keys.batches(sub), keys.owner(sub)]
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, revision, sub, absent_ms]
    return Call(script("park"), names, args, lambda a: Parked(_text(a[0]), *(int(v) for v in a[1:])))


def grant(keys: Keys, lead: Leadership, sub: str, groups: int, completed: int, counted: Sequence[str]) -> Call[int]:
    """Owe ``groups`` to the batch that ``sub`` asks for, if the gate of ``counted`` is closed and nothing is in flight.

    ``completed``: groups that the run had completed when ``groups`` was reckoned. Groups owed now; 0: none were
    granted; -1: leadership lost.
    """
    names = [keys.leader, keys.subs, keys.sub(sub), keys.delayed, keys.counters]
    lanes = [keys.jobs(lane) for lane in ("train", "resume", "suspect")]
    args: list[Value] = [keys.prefix, lead.epoch, lead.token, groups, completed]
    return Call(script("grant"), [*names, *lanes, *map(keys.sub, counted)], args, int)


def sweep(keys: Keys, lead: Leadership, groups: Iterable[tuple[str, int]]) -> Call[int]:
    """Delete sealed groups (job, n) whose payloads are unlinked. -1: leadership lost."""
    flat: list[Value] = [part for pair in groups for part in pair]
    return Call(script("sweep"), [keys.leader], [keys.prefix, lead.epoch, lead.token, *flat], int)


def tidy(keys: Keys, records: str, stale: Iterable[tuple[str, bytes]], *, consumers: bool = False) -> Call[int]:
    """Remove (field, record) pairs of a hash as they were read; with ``consumers``, those of dead workers too."""
    flat: list[Value] = [part for pair in stale for part in pair]
    lanes = [keys.jobs(lane) for lane in LANES] if consumers else []
    return Call(script("tidy"), [records, *lanes], [keys.prefix, *flat], int)


# --- trainer ----------------------------------------------------------------------------------------------------


#: Marks a subscribe that was planned on a revision that has moved.
MOVED = -2


def subscribe(
    keys: Keys, sub: str, definition: Mapping[str, Value], *, revision: int | None = None, operator: bool = False
) -> Call[int]:
    """Make or change a subscription; the revision of subs, or ``MOVED``.

    Args:
        revision: the one that the change was planned on; None: any.
        operator: these fields stay when the trainer comes back with its own; an empty value lets go of one.

    Raises ConfigError when one of this name was dropped, or a field may not be what is asked for.
    """

    def parse(answer: Any) -> int:
        code, *what = int(answer[0]), *_texts(answer[1:])
        if code == -1:
            raise ConfigError(f"Subscription {sub!r} of run {keys.run!r} was dropped: take another name.")
        if code == -5:
            raise ConfigError(
                f"The pool of {sub!r} in run {keys.run!r} was dropped with its last member: name another."
            )
        if code == -3:
            raise ConfigError(
                f"The {what[0]} of subscription {sub!r} cannot change: groups remember it. Take another name."
            )
        if code == -4:
            raise ConfigError(
                f"Subscription {sub!r} and {what[1]!r} share one pool, so their {what[0]} must be the same."
            )
        return code

    flat: list[Value] = [part for pair in definition.items() for part in pair]
    rev: Value = "" if revision is None else revision
    return Call(script("subscribe"), [keys.subs, keys.sub(sub)], [keys.prefix, sub, rev, int(operator), *flat], parse)


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of join. ``holder_ms``: time left of the lease of another owner (-1: it was taken over)."""

    mine: bool
    gen: int = 0
    cursor: int = 0
    cut: int = 0
    ckpt: int = 0
    floor: int = 0
    holder_ms: int = 0


def join(keys: Keys, sub: str, owner: str, lease_ms: int, *, only_renew: bool = False) -> Call[Joined]:
    """Take, or keep, the ownership of a subscription."""

    def parse(answer: Any) -> Joined:
        if not answer[0]:
            return Joined(False, holder_ms=int(answer[1]))
        return Joined(True, *(int(v) for v in answer[1:]))

    args: list[Value] = [keys.prefix, owner, lease_ms, int(only_renew)]
    return Call(script("join"), [keys.sub(sub), keys.owner(sub), keys.subs], args, parse)


def leave(keys: Keys, sub: str, owner: str) -> Call[bool]:
    return Call(script("leave"), [keys.owner(sub)], [owner], bool)


def ask(keys: Keys, sub: str, n: int, owner: str, gen: int) -> Call[bool]:
    """Say that batch ``n`` is waited for. False: the subscription is not the caller's."""
    return Call(script("ask"), [keys.sub(sub), keys.samples], [keys.prefix, sub, n, owner, gen], bool)


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Outcome of commit_batch: committed, waiting (for other ranks), already, owner, order, diverged, unknown or role.

    ``bits``: ``ROLE:0110,...``, a 1 for each rank of each role that has the batch behind it.
    """

    outcome: str
    cursor: int
    bits: str = ""


def commit_batch(
    keys: Keys, sub: str, *, owner: str, gen: int, n: int, digest: str, rank: int, ranks: int, role: str = ""
) -> Call[BatchCommit]:
    """One rank of one role has batch ``n`` behind it; the last one moves the cursor."""
    args: list[Value] = [keys.prefix, owner, gen, n, digest, rank, ranks, role]
    names = [keys.sub(sub), keys.batches(sub)]
    return Call(script("commit_batch"), names, args, lambda a: BatchCommit(_text(a[0]), int(a[1]), _text(a[2])))


def column(
    keys: Keys,
    sub: str,
    *,
    owner: str,
    gen: int,
    n: int,
    digest: str,
    rank: int,
    role: str,
    most: int,
    ttl_s: int,
    places: Iterable[tuple[str, str]],
) -> Call[str]:
    """Announce that a column of batch ``n`` is written to (server, key) places: ok, or why it must not be."""
    names = [keys.sub(sub), keys.batches(sub), keys.columns(sub)]
    head: list[Value] = [keys.prefix, owner, gen, n, digest, rank, role, most, ttl_s]
    return Call(script("column"), names, [*head, *(f"{server}|{key}" for server, key in places)], _text)


def write_column(key: str, ttl_s: int, values: Mapping[int, bytes]) -> Call[list[int]]:
    """Values of a column by row index, on the payload server that has it; rows that hold other bytes already."""
    flat: list[Value] = [part for pair in values.items() for part in pair]
    return Call(script("write_column"), [key], [ttl_s, *flat], lambda answer: [int(row) for row in answer])


def column_lost(keys: Keys, sub: str, ttl_s: int, values: Iterable[str]) -> Call[int]:
    """Count values (DIGEST/COLUMN/ROW) that a column does not have because its writer lost the payload; new ones."""
    return Call(script("column_lost"), [keys.columns_lost(sub), keys.counters], [keys.prefix, ttl_s, *values], int)


def agree(
    keys: Keys, sub: str, *, owner: str, gen: int, number: int, role: str, rank: int, ranks: int, word: str, ttl_s: int
) -> Call[list[str] | None]:
    """Say ``word`` in round ``number``; what every rank of the role said in it ('': nothing yet).

    None: the subscription is not the caller's.
    """

    def parse(answer: Any) -> list[str] | None:
        return _texts(answer[1:]) if _text(answer[0]) == "ok" else None

    args: list[Value] = [keys.prefix, owner, gen, number, role, rank, ranks, word, ttl_s]
    return Call(script("agree"), [keys.sub(sub), keys.agree(sub)], args, parse)


def publish(
    keys: Keys,
    sub: str,
    *,
    owner: str,
    gen: int,
    model: str,
    version: int,
    through: int,
    step: int,
    record: bytes,
    rev: int = 0,
    known: int = 0,
) -> Call[int]:
    """Announce a version; returns the version of the clock. Raises PublishError when it cannot be.

    ``known``: the newest version that a trainer or an engine holds. It is above the clock only when a failover lost
    publications; the next version is then ``known + 1``, and those between are abandoned (T1).
    """

    def parse(answer: Any) -> int:
        outcome, clock = _text(answer[0]), int(answer[1])
        if outcome in ("published", "already"):
            return clock
        why = {
            "owner": f"subscription {sub!r} belongs to another trainer by now, or was rewound",
            "version": f"the clock of model {model!r} stands at {clock}, so the next version is {clock + 1}",
            "through": f"batch {through} is not committed, or a version consumed it already",
        }[outcome]
        raise PublishError(f"Version {version} of model {model!r} cannot be announced: {why}.")

    names = [keys.clock, keys.sub(sub), keys.batches(sub), keys.weights(model), keys.steps(model)]
    args: list[Value] = [keys.prefix, owner, gen, version_field(model), version, through, step, rev, record, known]
    return Call(script("publish"), names, args, parse)


def checkpointed(keys: Keys, sub: str, *, owner: str, gen: int, n: int, role: str = "") -> Call[int]:
    """The role's file that holds everything up to batch ``n`` is safe. 0: not the caller's; -1: not committed."""
    return Call(script("checkpointed"), [keys.sub(sub), keys.samples], [keys.prefix, owner, gen, n, role], int)


@dataclass(frozen=True, slots=True)
class Rewound:
    """Outcome of rewind: rewound (with the new gen), owner, floor or cursor (with the limit)."""

    outcome: str
    gen: int
    limit: int


def rewind(keys: Keys, sub: str, *, owner: str, gen: int, n: int, model: str) -> Call[Rewound]:
    """Deliver every batch after ``n`` again; versions that consumed any of them are abandoned."""
    args: list[Value] = [keys.prefix, owner, gen, n, version_field(model) if model else ""]
    names = [keys.sub(sub), keys.batches(sub), keys.clock, keys.weights(model or "-"), keys.subs]
    return Call(script("rewind"), names, args, lambda a: Rewound(_text(a[0]), int(a[1]), int(a[2])))


def lost(keys: Keys, samples: Iterable[tuple[str, int]]) -> Call[int]:
    """Payloads of these samples (job, k) are gone; how many nobody had reported before."""
    flat: list[Value] = [part for pair in samples for part in pair]
    return Call(script("lost"), [keys.counters], [keys.prefix, *flat], int)


# --- all --------------------------------------------------------------------------------------------------------


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Make a payload server known, or change its state; the directory's revision, 0 where nothing was changed."""
    return Call(script("server"), [keys.servers], [name, record, int(only_new)], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Show a small record in one of the hashes workers, trainers or waits; empty takes it away."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


# --- set-up -----------------------------------------------------------------------------------------------------


def ensure_lanes(client: "redis.Redis", keys: Keys) -> None:
    """Create the job streams and their consumer group. Idempotent; blocks for one round trip per lane."""
    for lane in LANES:
        try:
            client.xgroup_create(keys.jobs(lane), "workers", id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise
