"""Rows of retiring groups: one per sample, from its record, its payload and the fate of its group."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from penstock import payloads
from penstock.consumers.history.fates import fate_of, uses_of_sample
from penstock.consumers.history.retired import Retired
from penstock.consumers.history.texts import Texts
from penstock.errors import PayloadError
from penstock.history.row import WHOLE_JOB, Fate, SampleRow, Use
from penstock.payloads import Payload
from penstock.protocol.records.manifest import Row
from penstock.protocol.records.sample_meta import SampleMeta

log = logging.getLogger(__name__)

Bytes = bytes | memoryview
#: (subscription, batch) -> commit time of all ranks (Unix seconds).
Trained = Mapping[tuple[str, int], float]


def wanted_row(group: Retired, meta: SampleMeta) -> Row:
    """Return the location of a sample's payload, in the form that the payload reader takes."""
    return Row(
        job=group.job, k=meta.k, token=meta.token, server=meta.server, checksum=meta.checksum,
        num_bytes=meta.num_bytes, length=meta.length, prompt_length=meta.prompt_length,
        num_generated=meta.num_generated, num_loss=meta.num_loss, oldest=meta.oldest, newest=meta.newest,
        oldest_loss=meta.oldest, reward=meta.reward, status=meta.status, shared=meta.shared,
    )  # fmt: skip


def row_of_job(group: Retired) -> SampleRow:
    """Return the row of a job that ended without a sample."""
    fate, reason = fate_of(group, None, [])
    return SampleRow(
        group.job, WHOLE_JOB, lane=group.lane, attempts=group.attempts, crashes=group.crashes, tries=group.tries,
        admitted_s=group.admitted_s, leased_s=group.leased_s, fate=fate, reason=reason,
    )  # fmt: skip


def row_of(
    group: Retired, meta: SampleMeta, data: Bytes | None, texts: Texts | None, trained: Trained
) -> tuple[SampleRow, list[Use]]:
    """Return the row of one sample, and its uses.

    Args:
        data: its payload; None if it is gone or not needed.
        texts: decodes tokens; None: answers and tokens of this group are not recorded.
    """
    uses = uses_of_sample(group, meta)
    fate, reason = fate_of(group, meta, uses)
    payload = _opened(group, meta, data)
    if payload is None and texts is not None and fate != Fate.PAYLOAD_LOST:
        # A trained sample stays trained, though its answer is lost.
        fate, reason = (fate, "payload_lost") if fate == Fate.TRAINED else (Fate.PAYLOAD_LOST, reason)
    return (
        SampleRow(
            group.job, meta.k, lane=group.lane, **_kept(payload, texts), label=group.label,
            prompt_length=meta.prompt_length, num_generated=meta.num_generated, reward=meta.reward,
            reward_info=meta.reward_info, status=meta.status, finish_reason=meta.finish_reason, oldest=meta.oldest,
            newest=meta.newest, worker=meta.worker, attempts=group.attempts, crashes=group.crashes,
            tries=group.tries, num_turns=meta.num_turns, num_aborts=meta.num_aborts, cached_tokens=meta.cached_tokens,
            **_times(group, meta, uses, trained), generate_s=meta.generate_s, reward_s=meta.reward_s,
            fate=fate, reason=reason,
        ),
        uses,
    )  # fmt: skip


def _opened(group: Retired, meta: SampleMeta, data: Bytes | None) -> Payload | None:
    if data is None:
        return None
    try:
        return payloads.decode(data, f"{group.job}/{meta.k}", meta.checksum)
    except PayloadError as exc:
        log.warning("history: %s", exc)
        return None


def _kept(payload: Payload | None, texts: Texts | None) -> dict[str, Any]:
    if payload is None or texts is None:
        return {}
    tokens, split = payload.tokens.tolist(), payload.prompt_length
    return {
        "prompt": texts.prompt(tokens[:split]),
        "answer": texts.answer(tokens[split:]),
        "is_spelled": texts.is_spelled,
        "tokens": payload.tokens,
        "logprobs": payload.logprobs,
        "versions": payload.versions,
        "generated": payload.generated,
        "loss_mask": payload.loss_mask,
    }


def _times(group: Retired, meta: SampleMeta, uses: Sequence[Use], trained: Trained) -> dict[str, Any]:
    """Return Unix seconds; of several batches that held it, the first counts."""
    cuts = [use.cut_s for batches in group.uses.values() for use in batches]
    steps = [trained[use.subscription, use.batch] for use in uses if (use.subscription, use.batch) in trained]
    return {
        "admitted_s": group.admitted_s,
        "leased_s": group.leased_s,
        "started_s": meta.started_s,
        "first_token_s": meta.first_token_s,
        "drawn_s": meta.drawn_s,
        "pauses": [[_after(meta, begin), _after(meta, begin + length)] for begin, length in meta.pauses],
        "rewarded_s": meta.drawn_s + meta.reward_s if meta.drawn_s else 0.0,
        "committed_s": meta.packed_s,
        "ready_s": group.ready_s,
        "cut_s": min(cuts, default=0.0),
        "trained_s": min(steps, default=0.0),
    }


def _after(meta: SampleMeta, ms: int) -> float:
    return meta.started_s + ms / 1000
