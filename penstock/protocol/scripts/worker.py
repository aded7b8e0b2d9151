"""Verbs of workers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ProtocolError
from penstock.names import LANES
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import NOTHING, Drawn
from penstock.records.sample_meta import SampleMeta
from penstock.redis.call import Call, Value, script, text, texts
from penstock.text import utf8_safe

#: Most characters that are kept of a failure.
MAX_DETAIL = 65536


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
    """A lease whose job record is not decoded yet, so that the job of a broken record can be failed by name."""

    job: str
    lane: str
    token: str
    not_before: int
    body: bytes
    attempts: int
    crashes: int
    committed: frozenset[int]
    #: All requested samples are committed, and only the group reward is missing.
    awaits_reward: bool = False

    def read(self) -> Job:
        """Decode the leased job.

        Raises:
            ProtocolError: its record is invalid, or of another job.
        """
        what = f"record of job {self.job}"
        job = Job.from_bytes(self.body, what)
        if job.id != self.job:
            raise ProtocolError(f"{what} is of {job.id[:200]!r}: it was not written for this job.")
        return replace(job, not_before=self.not_before)


def lease(
    keys: Keys,
    worker: str,
    base: str,
    *,
    most: int,
    version: int,
    suspects: int = 1,
    highest: int | None = None,
) -> Call[list[RawLease]]:
    """Take up to ``most`` jobs that an engine holding ``version`` may start, in the order of ``LANES``.

    ``highest``: version at admission up to which it may; None: its own (T12).
    """

    def parse(answer: Any) -> list[RawLease]:
        return [
            RawLease(
                job=text(row[1]),
                lane=text(row[0]),
                token=text(row[2]),
                not_before=int(row[3]),
                body=bytes(row[4]),
                attempts=int(row[5]),
                crashes=int(row[6]),
                committed=frozenset(int(k) for k in row[7]),
                awaits_reward=bool(row[8]),
            )
            for row in answer
        ]

    args: list[Value] = [
        keys.prefix,
        worker,
        base,
        most,
        version,
        suspects,
        version if highest is None else highest,
        *LANES,
    ]
    return Call(script("lease"), [keys.inflight, keys.paused, *map(keys.jobs, LANES)], args, parse)


def renew(keys: Keys, worker: str, leases: Iterable[tuple[str, str]]) -> Call[list[str]]:
    """Renew (job, token) leases; return the jobs whose lease is lost."""
    flat = [part for pair in leases for part in pair]
    return Call(script("renew"), [keys.counters], [keys.prefix, worker, *flat], texts)


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of commit: ``ok``, ``ready`` (the group is complete) or ``lost`` (the lease is another's).

    ``reward``: all samples are committed, the lease continues, and the group reward is still to come.
    """

    outcome: str
    new: int
    again: int
    taken: int


def commit(
    keys: Keys,
    job: str,
    token: str,
    samples: Iterable[tuple[int, int, bytes]],
    usage: Mapping[int, Drawn] | None = None,
    *,
    with_reward: bool = False,
) -> Call[Committed]:
    """Commit samples of one job: (k, oldest generated version or -1, SampleMeta record) each.

    Args:
        usage: report of each sample's tokens, by k; None: that of its record. Raises ProtocolError if that is invalid.
        with_reward: a group reward is still to come (``reward``); this cannot be undone for a group.
    """
    args: list[Value] = [keys.prefix, job, token, int(with_reward)]
    for k, oldest, record in samples:
        drawn = Drawn.recorded(SampleMeta.from_bytes(record)) if usage is None else usage[k]
        args += [k, oldest, record, str(drawn)]

    def parse(answer: Any) -> Committed:
        return Committed(text(answer[0]), *(int(v) for v in answer[1:]))

    return Call(script("commit"), [keys.group(job), keys.meta(job)], args, parse)


def reward(keys: Keys, job: str, token: str, records: Iterable[bytes]) -> Call[str]:
    """Write the reward of a group, which makes it ready. Returns ready, lost, or missing (a sample, or the reward).

    Args:
        records: SampleMeta records of all its samples, with their final rewards.
    """
    args: list[Value] = [keys.prefix, job, token, b"".join(records)]
    return Call(script("reward"), [keys.group(job), keys.meta(job)], args, text)


def checkpoint(
    keys: Keys, job: str, token: str, k: int, record: bytes, ttl_s: int, usage: Drawn | None = None
) -> Call[bool]:
    """Keep a running sample's prefix. False: the lease is lost.

    Args:
        usage: report of its tokens; its live tokens are those of ``record``. None: no report.
    """
    args: list[Value] = [keys.prefix, token, k, record, ttl_s, str(usage or "")]
    return Call(script("checkpoint"), [keys.group(job), keys.partial(f"{job}/{k}")], args, bool)


def extend(
    keys: Keys,
    job: str,
    token: str,
    k: int,
    record: bytes,
    *,
    before: int,
    ttl_s: int,
    most: int,
    usage: Drawn | None = None,
) -> Call[str]:
    """Append to a prefix of ``before`` bytes: kept, lost, other (other bytes are stored), or full (more than ``most``).

    Args:
        usage: see ``checkpoint``; its live tokens are those of the complete prefix.
    """
    args: list[Value] = [keys.prefix, token, k, before, record, ttl_s, most, str(usage or "")]
    return Call(script("extend"), [keys.group(job), keys.partial(f"{job}/{k}")], args, text)


def unread(keys: Keys, job: str, token: str, samples: Iterable[int]) -> Call[bool]:
    """Drop the prefixes of these k, which cannot be continued. False: the lease is lost."""
    return Call(script("unread"), [keys.group(job)], [keys.prefix, job, token, *samples], bool)


def _flat(usage: Mapping[int, Drawn]) -> list[Value]:
    return [part for k, drawn in usage.items() for part in (k, str(drawn))]


def release(
    keys: Keys, job: str, token: str, usage: Mapping[int, Drawn] = NOTHING, *, worker: str = "", death: str = ""
) -> Call[bool]:
    """Hand a job back, without a charge unless workers die under it. False: the lease is lost.

    Args:
        usage: report of tokens of each sample that is not committed, by k.
        death: the error that ends the worker; '': it drains. The job is charged from the third such worker on.
    """
    argv = [keys.prefix, job, token, worker, utf8_safe(death, MAX_DETAIL), *_flat(usage)]
    return Call(script("release"), [keys.group(job)], argv, lambda went: text(went) != "lost")


def abandon(keys: Keys, lane: str, worker: str, known: Iterable[str], *, death: str = "") -> Call[list[str]]:
    """Release jobs that are pending for this worker and not in ``known``; ``death`` as in ``release``."""
    argv = [keys.prefix, lane, worker, utf8_safe(death, MAX_DETAIL), *known]
    return Call(script("abandon"), [keys.jobs(lane)], argv, texts)


#: Crashes of engines on a publication without a finished request until it is set aside. One job that crashes engines
#: causes two of them before it is a suspect, and one more before another suspect has its turn.
DEATHS = 5


def crash(
    keys: Keys,
    job: str,
    token: str,
    worker: str,
    detail: str,
    *,
    model: str = "",
    publication: str = "",
    engine: str = "",
    sure: bool = True,
    usage: Mapping[int, Drawn] = NOTHING,
) -> Call[str]:
    """Report that the engine crashed under this job. Returns resume, suspect, dead or lost.

    Args:
        publication: weights of the engine, ``VERSION-REV``; '': none to charge.
        engine: name of this start of the engine.
        sure: it had finished something since it started; else a suspect is not dead yet.
        usage: see ``release``.
    """
    names = [keys.group(job), keys.trials(model), keys.aside(model)]
    kept = utf8_safe(detail, MAX_DETAIL)
    args: list[Value] = [keys.prefix, job, token, worker, kept, publication, engine, int(sure), DEATHS, *_flat(usage)]
    return Call(script("crash"), names, args, text)


def fail(
    keys: Keys,
    job: str,
    token: str,
    worker: str,
    *,
    reason: str,
    detail: str,
    max_attempts: int,
    retry_ms: int,
    max_retry_ms: int = 60_000,
    usage: Mapping[int, Drawn] = NOTHING,
) -> Call[str]:
    """Report a failed attempt. Returns delayed, dead or lost. ``max_attempts`` 0 makes the job dead at once.

    Args:
        retry_ms: wait before the next attempt; doubles with each, up to ``max_retry_ms``.
        usage: see ``release``.
    """
    args: list[Value] = [
        keys.prefix,
        job,
        token,
        worker,
        reason,
        utf8_safe(detail, MAX_DETAIL),
        max_attempts,
        retry_ms,
        max_retry_ms,
        *_flat(usage),
    ]
    return Call(script("fail"), [keys.group(job), keys.delayed, keys.bodies], args, text)


def ended(keys: Keys, kinds: Iterable[tuple[str, str, str]], window: int) -> Call[int]:
    """Record how jobs ended: (kind, a digit for each job, last error) each; the last ``window`` are remembered."""
    flat = [utf8_safe(part) for kind in kinds for part in kind]
    return Call(script("ended"), [keys.ends], [keys.prefix, window, *flat], int)
