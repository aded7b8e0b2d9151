"""Restore committed samples from payloads and records, without their side arrays."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby

from penstock import payloads
from penstock.errors import PayloadError
from penstock.payloads.sides import key_of
from penstock.protocol.keys import Keys
from penstock.protocol.records.causes import Cause, PayloadServersAway
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import FinishReason, Sample, SampleStatus
from penstock.protocol.records.sample_meta import SampleMeta, stored
from penstock.workers.jobs.payload_stores import PayloadStores
from penstock.workers.jobs.stops import StopRule

#: Seconds between two attempts to read from a payload server that does not respond.
LOOK_S = 1.0
BlockedOn = Callable[[Cause | None], None]


async def read_payloads(
    stores: PayloadStores, keys: Keys, job: str, metas: Sequence[SampleMeta], blocked_on: BlockedOn
) -> dict[int, bytes]:
    """Return the payload bytes of committed samples by k; the time to live of all their data is renewed.

    Waits for a payload server that does not respond, until it does or is lost.

    Args:
        blocked_on: called with the cause of a wait, None at its end.

    Raises:
        PayloadError: one is gone.
    """
    found: dict[int, bytes] = {}
    for server in sorted({meta.server for meta in metas}):
        of_server = [meta for meta in metas if meta.server == server]
        sizes = {stored(keys, job, meta): meta.shared[2] if meta.shared else meta.num_bytes for meta in of_server}
        sides = [key_of(keys, job, one.k, one.token, side) for one in of_server for side in one.sides]
        read = partial(stores.read, server, list(sizes.items()), [*sizes, *sides])
        values = dict(zip(sizes, await _answer(read, stores, server, blocked_on), strict=True))
        for meta in of_server:
            value = values[stored(keys, job, meta)]
            if value is None:
                raise PayloadError(
                    f"sample {job}/{meta.k}: its payload on {server} is gone, and the reward of its group needs it."
                )
            begin = meta.shared[1] if meta.shared else 0
            found[meta.k] = value[begin : begin + meta.num_bytes] if meta.shared else value
    return found


async def _answer(
    read: Callable[[], Awaitable[list[bytes | None] | None]],
    stores: PayloadStores,
    server: str,
    blocked_on: BlockedOn,
) -> list[bytes | None]:
    is_blocked = False
    while (values := await read()) is None:
        blocked_on(PayloadServersAway((server,)))
        is_blocked = True
        await asyncio.sleep(LOOK_S)
        await stores.look()
    if is_blocked:
        blocked_on(None)
    return values


def sample_of(job: Job, meta: SampleMeta, data: bytes, stops: StopRule) -> Sample:
    """Restore the sample of a record and its payload. Raises PayloadError if the bytes do not match the record."""
    sample = Sample(job, meta.k)
    payload = payloads.decode(data, sample.id, meta.checksum)
    sample.tokens, sample.logprobs = payload.tokens.tolist(), payload.logprobs.tolist()
    sample.generated, sample.loss_mask = payload.generated.tolist(), payload.loss_mask.tolist()
    sample.versions, sample.prompt_length = payload.versions.tolist(), payload.prompt_length
    sample.status, sample.finish_reason = meta.status, meta.finish_reason
    sample.reward, sample.reward_info = meta.reward, meta.reward_info
    sample.num_turns, sample.num_aborts, sample.num_unproven = meta.num_turns, meta.num_aborts, meta.num_unproven
    sample.cached_tokens, sample.pauses = meta.cached_tokens, meta.pauses
    sample.started_s, sample.first_token_s, sample.drawn_s = meta.started_s, meta.first_token_s, meta.drawn_s
    sample.generate_s, sample.reward_s = meta.generate_s, meta.reward_s
    sample.turns = _turns(sample, stops)
    sample.text = "".join(sample.turns)
    return sample


def _turns(sample: Sample, stops: StopRule) -> list[str]:
    """Return the text of each turn, as it was when the turn was generated."""
    if sample.status == SampleStatus.GIVEN:
        answer = sample.job.answers[sample.k] if sample.k < len(sample.job.answers) else None
        if isinstance(answer, str):
            return [answer]
    runs = [list(run) for drawn, run in groupby(range(len(sample.tokens)), lambda i: sample.generated[i]) if drawn]
    ends = [True] * (len(runs) - 1) + [sample.finish_reason == FinishReason.STOP]
    return [
        stops.text_of(sample.tokens[run[0] : run[-1] + 1], stopped=ended) for run, ended in zip(runs, ends, strict=True)
    ]
