"""Samples that are still in Redis, as rows of a history: their records, without text and tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.consumers.history.retired import Retired, group_of, read_trained
from penstock.consumers.history.rows import Trained, row_of_job, rows_of
from penstock.history.row import SampleRow, Use
from penstock.records.codec import count_shown, name_shown
from penstock.records.keys import Keys
from penstock.redis.commands import Client

#: Groups read per round trip.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class LiveJob:
    """The state of a job in Redis."""

    #: A ``JobState``.
    state: str
    #: A single row without a sample if none is committed; ``fate`` is '' (open), ``reason`` the state.
    rows: Sequence[SampleRow]
    uses: Sequence[Use]
    #: (subscription, batch) -> when it was cut, and when all its ranks had committed it (Unix seconds).
    cut_s: Mapping[tuple[str, int], float]
    trained_s: Trained
    #: Description of invalid records; '' if all are valid.
    broken: str


def read_live(client: Client, keys: Keys) -> tuple[list[SampleRow], list[Use]]:
    """Return the committed samples of all jobs that are begun, ready or retiring.

    Blocks for a round trip per ``CHUNK`` groups.

    Unreadable groups are skipped: the commands that show groups report them.
    """
    rows: list[SampleRow] = []
    uses: list[Use] = []
    for job, raw, meta in read_groups(client, keys, _jobs(client, keys)):
        found = _live(job, raw, meta, {}) if meta else None
        if found is not None and not found.broken:
            rows += found.rows
            uses += found.uses
    return rows, uses


def read_live_job(client: Client, keys: Keys, job: str) -> LiveJob | None:
    """Return one job in any state; None if it has no group. Blocks for a few round trips."""
    raw = client.hgetall(keys.group(job))
    if not raw:
        return None
    meta = client.get(keys.meta(job))
    group = group_of(job, raw, meta)
    return _live(job, raw, meta, read_trained(client, keys, [group]))


def _live(job: str, raw: Mapping[bytes, bytes], meta: bytes | None, trained: Trained) -> LiveJob:
    group, state = group_of(job, raw, meta), name_shown(raw.get(b"st", b""))[:200]
    made = [row for one in group.samples for row in rows_of(group, one, None, None, trained)]
    rows = [replace(row, fate="", reason=state) for row, _ in made or [(row_of_job(group), [])]]
    uses = [use for _, used in made for use in used] or list(_last_uses(group, raw))
    cut = {(sub, use.batch): use.cut_s for sub, found in group.uses.items() for use in found}
    return LiveJob(state, rows, uses, cut, trained, group.broken)


def _jobs(client: Client, keys: Keys) -> list[str]:
    """Return the jobs of all groups that may have samples, the latest ones last."""
    retiring = (*client.sscan_iter(keys.retiring), *client.zrange(keys.unrecorded, 0, -1))
    ready, begun = client.zrange(keys.ready, 0, -1), client.zrange(keys.inflight, 0, -1)
    return list(dict.fromkeys(map(name_shown, (*retiring, *ready, *begun))))


def read_groups(client: Client, keys: Keys, jobs: Sequence[str]) -> Iterator[tuple[str, Mapping[bytes, bytes], bytes]]:
    """Yield job, hash and metadata of each existing group. Blocks for a round trip per ``CHUNK`` groups."""
    for start in range(0, len(jobs), CHUNK):
        chunk = jobs[start : start + CHUNK]
        pipe = client.pipeline(transaction=False)
        for job in chunk:
            pipe.hgetall(keys.group(job))
            pipe.get(keys.meta(job))
        answers = iter(pipe.execute(raise_on_error=False))
        for job, raw, meta in zip(chunk, answers, answers, strict=True):
            if isinstance(raw, dict) and raw:
                yield job, raw, meta if isinstance(meta, bytes) else b""


def _last_uses(group: Retired, raw: Mapping[bytes, bytes]) -> Iterator[Use]:
    """Yield the last batch of each subscription: all that a group knows in a run without a history."""
    for name, value in raw.items():
        batch = count_shown(value) if name.startswith(b"b:") else None
        if batch is not None:
            sub = name_shown(name[2:])[:200]
            yield from (Use(group.job, meta.k, sub, batch, version=-1) for meta in group.samples)
