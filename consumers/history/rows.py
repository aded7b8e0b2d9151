"""Make history rows of retiring groups, one per sample or part, from its record, payload and fate."""

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from penstock import payloads
from penstock.consumers.history.retired import Retired
from penstock.consumers.history.texts import Texts
from penstock.errors import PayloadError
from penstock.history.row import SCORES, WHOLE_JOB, Fate, SampleRow, Use
from penstock.payloads import Payload
from penstock.records.disposal import Disposal
from penstock.records.sample_meta import Part, SampleMeta

log = logging.getLogger(__name__)

#: Reasons with other names in rows. ``unused``: no subscription read the group, because its lane has no trainer or the
#: subscription was dropped.
_REASONS = {"unwanted": "unused", "unknown": ""}


def uses_of_sample(group: Retired, meta: SampleMeta, part: Part | None = None, index: int = 0) -> list[Use]:
    """Return the uses of a sample, or of its part ``index``, in batches of all subscriptions."""
    found = []
    for sub, uses in sorted(group.uses.items()):
        for use in uses:
            bearing = [] if meta.k in group.lost else use.bearing(meta, part)
            oldest = min((version for version, _ in bearing), default=-1)
            staleness = use.staleness(oldest) if bearing else -1
            loss_tokens = sum(count for _, count in bearing)
            found.append(Use(group.job, meta.k, sub, use.batch, use.train_version, staleness, loss_tokens, index))
    return found


def fate_of(group: Retired, meta: SampleMeta | None, uses: list[Use]) -> tuple[Fate, str]:
    """Return fate and reason of a sample of a retiring group, or (``meta`` None) of a job that ended without samples.

    If subscriptions differ, the first of these counts: payload lost, trained, masked, filtered, dropped.
    """
    if group.broken:
        return Fate.DROPPED, Disposal.UNREADABLE
    if meta is not None and meta.k in group.lost:
        return Fate.PAYLOAD_LOST, ""
    account, _, reason = group.account.partition(":")
    if account in (Fate.CANCELLED, Fate.EVICTED):
        return Fate(account), ""
    if group.lane in SCORES:
        return SCORES[group.lane], ""
    if account == Fate.MASKED:
        durable = [use for use in uses if use.batch <= group.checkpoints.get(use.subscription, 0)]
        # Without uses, the group was cut before the run recorded a history.
        bore_loss = any(use.loss_tokens for use in durable) if uses else meta is not None and meta.num_loss > 0
        return (Fate.TRAINED if bore_loss else Fate.MASKED), ""
    fate = Fate(account) if account in (Fate.FILTERED, Fate.PAYLOAD_LOST) else Fate.DROPPED
    return fate, _REASONS.get(reason, reason)


Bytes = bytes | memoryview
#: (subscription, batch) -> commit time of all ranks (Unix seconds).
Trained = Mapping[tuple[str, int], float]


def row_of_job(group: Retired) -> SampleRow:
    """Return the row of a job that ended without samples."""
    fate, reason = fate_of(group, None, [])
    return SampleRow(
        group.job, WHOLE_JOB, lane=group.lane, attempts=group.attempts, crashes=group.crashes, tries=group.tries,
        admitted_s=group.admitted_s, leased_s=group.leased_s, fate=fate, reason=reason,
    )  # fmt: skip


def rows_of(
    group: Retired, meta: SampleMeta, data: Bytes | None, texts: Texts | None, trained: Trained
) -> list[tuple[SampleRow, list[Use]]]:
    """Return (row, uses) of a sample, or of each of its parts.

    Args:
        data: payload; None if it is gone or not needed.
        texts: decoder of tokens; None if answers and tokens of this group are not recorded.
    """
    payload = _opened(group, meta, data)
    if not meta.parts:
        return [_row_of(group, meta, payload, texts, trained)]
    parts = meta.all_parts
    ends = pairwise(accumulate((part.length for part in parts), initial=0))
    cut = [None if payload is None else payload.cut(*end) for end in ends]
    found = enumerate(zip(parts, cut, strict=True))
    return [_row_of(group, meta, of_part, texts, trained, part, index) for index, (part, of_part) in found]


def _row_of(
    group: Retired,
    meta: SampleMeta,
    payload: Payload | None,
    texts: Texts | None,
    trained: Trained,
    part: Part | None = None,
    index: int = 0,
) -> tuple[SampleRow, list[Use]]:
    of = meta if part is None else part
    uses = uses_of_sample(group, meta, part, index)
    fate, reason = fate_of(group, meta, uses)
    if payload is None and texts is not None and fate != Fate.PAYLOAD_LOST:
        # A trained sample stays trained even if its answer is lost.
        fate, reason = (fate, "payload_lost") if fate == Fate.TRAINED else (Fate.PAYLOAD_LOST, reason)
    return (
        SampleRow(
            group.job, meta.k, index, lane=group.lane, **_kept(payload, texts), label=group.label,
            prompt_length=of.prompt_length, num_generated=of.num_generated, reward=meta.reward,
            reward_info=meta.reward_info, status=meta.status, finish_reason=meta.finish_reason, oldest=of.oldest,
            newest=of.newest, worker=meta.worker, attempts=group.attempts, crashes=group.crashes,
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
    """Return times in Unix seconds; the first of several batches counts."""
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
