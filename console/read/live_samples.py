"""Samples that are still in Redis, as rows of a history: their records, without text and tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.errors import ProtocolError
from penstock.history.row import SampleRow, Use
from penstock.protocol.keys import Keys
from penstock.protocol.records.sample_meta import SampleMeta, iter_metas
from penstock.protocol.records.small_maps import count_of, name_shown
from penstock.redis.commands import Client

#: Groups that are read, the latest ones.
MOST_GROUPS = 4096
#: Groups read per round trip.
CHUNK = 256


def read_live(client: Client, keys: Keys) -> tuple[list[SampleRow], list[Use]]:
    """Committed samples of jobs that are begun, ready or retiring. Blocks for a round trip per ``CHUNK`` groups.

    ``fate`` is '', for it is open; ``reason`` is the state of the job. Groups that cannot be read are left out: the
    commands that look into groups tell of them.
    """
    jobs = _jobs(client, keys)
    rows: list[SampleRow] = []
    uses: list[Use] = []
    for start in range(0, len(jobs), CHUNK):
        for job, raw, meta in _groups(client, keys, jobs[start : start + CHUNK]):
            try:
                found = [_row(job, raw, one) for one in iter_metas(meta, f"metadata of group {job}")]
                used = list(_uses(job, raw, found))
            except ProtocolError:
                continue
            rows += found
            uses += used
    return rows, uses


def _jobs(client: Client, keys: Keys) -> list[str]:
    """The latest ones last."""
    ready = client.zrange(keys.ready, -MOST_GROUPS, -1)
    begun = client.zrange(keys.inflight, -MOST_GROUPS, -1)
    retiring = client.srandmember(keys.retiring, MOST_GROUPS)
    found = dict.fromkeys(map(name_shown, (*retiring, *ready, *begun)))
    return list(found)[-MOST_GROUPS:]


def _groups(client: Client, keys: Keys, jobs: Sequence[str]) -> Iterator[tuple[str, Mapping[bytes, bytes], bytes]]:
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        pipe.hgetall(keys.group(job))
        pipe.get(keys.meta(job))
    answers = pipe.execute(raise_on_error=False)
    for at, job in enumerate(jobs):
        raw, meta = answers[2 * at : 2 * at + 2]
        if isinstance(raw, dict) and raw and isinstance(meta, bytes):
            yield job, raw, meta


def _row(job: str, raw: Mapping[bytes, bytes], meta: SampleMeta) -> SampleRow:
    drawn_s = meta.started_s + meta.generate_s
    return SampleRow(
        job,
        meta.k,
        lane=name_shown(raw.get(b"ln", b"")),
        prompt_length=meta.prompt_length,
        num_generated=meta.num_generated,
        reward=meta.reward,
        reward_info=meta.reward_info,
        status=meta.status,
        finish_reason=meta.finish_reason,
        oldest=meta.oldest,
        newest=meta.newest,
        worker=meta.worker,
        attempts=_count(raw, b"att"),
        crashes=_count(raw, b"cr"),
        num_turns=meta.num_turns,
        num_aborts=meta.num_aborts,
        cached_tokens=meta.cached_tokens,
        leased_s=_count(raw, b"t0") / 1000,
        drawn_s=drawn_s,
        rewarded_s=drawn_s + meta.reward_s,
        generate_s=meta.generate_s,
        reward_s=meta.reward_s,
        reason=name_shown(raw.get(b"st", b""))[:200],
    )


def _count(raw: Mapping[bytes, bytes], field: bytes) -> int:
    return count_of(raw.get(field), f"field {name_shown(field)} of a group")


def _uses(job: str, raw: Mapping[bytes, bytes], rows: Iterable[SampleRow]) -> Iterator[Use]:
    """The last batch of each subscription, which is what a group knows."""
    for field, value in raw.items():
        if field.startswith(b"b:"):
            batch, name = count_of(value, f"The batch of group {job}"), name_shown(field[2:])[:200]
            yield from (Use(job, row.k, name, batch, version=-1) for row in rows)
