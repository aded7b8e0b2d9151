"""Encoding of payload bytes: samples are checked for what the loss relies on, then packed. See ``payloads``."""

import math
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.config.sampling import logprob_temperature, temperature_of
from penstock.errors import PayloadError
from penstock.payloads.format import (
    FLOAT32,
    GENERATED,
    INT32,
    LOSS,
    MAGIC,
    MAX_TOKENS,
    PRELUDE,
    UINT8,
    Array,
    Payload,
    Span,
    check,
    checksum_of,
    offsets,
)
from penstock.records.sample import Sample
from penstock.records.sample_meta import MAX_PARTS, Part, SampleMeta
from penstock.text import safe_repr

#: Most characters of a job's label that are stored with its first sample.
MAX_LABEL = 1024


def encode(sample: Sample) -> bytes:
    """Encode a sample.

    Its lists may be numpy arrays; those of the right dtype (int32, float32, uint8, uint8, int32) are not converted.

    Raises:
        PayloadError: lengths differ, a value does not fit its dtype, a mask holds anything but 0 and 1, a token that
            was not generated has loss or a version, or there are more than ``MAX_SPANS`` spans; or, in a sample that
            bears loss, a generated token whose logprob is not finite or that has no version, or another token whose
            logprob is not 0.
    """
    return b"".join(_chunks(_payload_of(sample)))


def pack(
    samples: Sequence[Sample],
    *,
    token: str,
    server: str,
    worker: str = "",
    temperature: float | None = None,
    logprob_kind: str = "scaled",
) -> tuple[bytes, list[SampleMeta]]:
    """Encode finished samples of one job, concatenated; return the bytes and the record of each sample.

    Args:
        token: lease token under which they will be committed.
        server: name of the payload server that the bytes will be written to, under the first sample's key.
        temperature: at which the engine sampled; None takes the job's. A greedy engine reports logprobs at
            temperature 1, and this is recorded then.

    Raises:
        PayloadError: a sample's arrays are inconsistent (see ``encode``), or its reward is not a number.
    """
    payloads = [_payload_of(sample) for sample in samples]
    data = b"".join(chunk for payload in payloads for chunk in _chunks(payload))
    view, begin = memoryview(data), 0
    metas, now = [], time.time()
    for sample, payload in zip(samples, payloads, strict=True):
        size = offsets(len(payload), len(payload.spans))[-1]
        checksum = checksum_of(view[begin : begin + size])
        shared = [samples[0].k, begin, len(data)] if len(samples) > 1 else []
        scale = logprob_temperature(temperature_of(sample.job.sampling) if temperature is None else temperature)
        counts = _part_of(payload)
        # Positional, in the order of SampleMeta: keywords take five times as long, for every sample.
        metas.append(
            SampleMeta(
                sample.k, token, server, checksum, size, len(payload), payload.prompt_length, counts.num_generated,
                scale, counts.loss_by_version, counts.oldest, counts.newest, _reward(sample), sample.status,
                sample.finish_reason, sample.reward_info, [], worker, shared, logprob_kind, sample.num_turns,
                sample.num_aborts, sample.cached_tokens, sample.started_s, sample.generate_s, sample.reward_s,
                sample.num_unproven, now, "" if sample.k else sample.job.label[:MAX_LABEL], sample.pauses,
                sample.first_token_s, sample.drawn_s, [] if sample.parts == [] else _parts_of(sample, payload),
            )
        )  # fmt: skip
        begin += size
    return data, metas


def _parts_of(sample: Sample, payload: Payload) -> list[list[Any]]:
    """Return the values of each part of a sample for its record. Raises PayloadError if its ``parts`` are invalid."""
    if not sample.has_valid_parts():
        raise PayloadError(
            f"sample {sample.id}: its parts {safe_repr(sample.parts)} are not at most {MAX_PARTS - 1} ascending "
            f"indices behind its prompt of {sample.prompt_length} and inside its {len(payload)} tokens, each of a "
            "token that was not generated."
        )
    return [list(_part_of(payload.cut(*ends))) for ends in pairwise([0, *sample.parts, len(payload)])]


def _part_of(payload: Payload) -> Part:
    """Count the tokens of a payload, and those that bear loss by version."""
    mask = payload.mask.tobytes()
    counts: dict[int, int] = {}
    for start, end, version in payload.spans:
        if bearing := mask.count(GENERATED | LOSS, start, end):
            counts[version] = counts.get(version, 0) + bearing
    versions = [version for _, _, version in payload.spans]
    return Part(
        length=len(payload),
        prompt_length=payload.prompt_length,
        num_generated=int(np.count_nonzero(payload.mask)),
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        loss_by_version=[[version, counts[version]] for version in sorted(counts)],
    )


def _reward(sample: Sample) -> float:
    if sample.reward is None or not math.isfinite(sample.reward):
        raise PayloadError(f"sample {sample.id}: its reward is {sample.reward}, not a number.")
    return float(sample.reward)


def _payload_of(sample: Sample) -> Payload:
    """Convert and check the lists of a sample. Raises PayloadError, see ``encode``."""
    tokens = _convert(sample.tokens, INT32, "tokens", sample.id)
    length, prompt_length = len(tokens), sample.prompt_length
    if length > MAX_TOKENS:
        raise PayloadError(f"sample {sample.id}: {length} tokens are more than the {MAX_TOKENS} a sample may have.")
    if not 0 <= prompt_length <= length:
        raise PayloadError(f"sample {sample.id}: a prompt of {prompt_length} of {length} tokens.")
    arrays = {
        "logprobs": _convert(sample.logprobs, FLOAT32, "logprobs", sample.id),
        "generated": _convert(sample.generated, UINT8, "generated", sample.id),
        "loss_mask": _convert(sample.loss_mask, UINT8, "loss_mask", sample.id),
        "versions": _convert(sample.versions, INT32, "versions", sample.id),
    }
    for name, array in arrays.items():
        if len(array) != length:
            raise PayloadError(f"sample {sample.id}: {len(array)} entries of {name} for {length} tokens.")
    generated, loss = arrays["generated"], arrays["loss_mask"]
    if (generated | loss).max(initial=0) > 1:
        raise PayloadError(f"sample {sample.id}: generated and loss_mask may hold 0 and 1 only.")
    spans = _spans_of(arrays["versions"])
    payload = Payload(tokens, arrays["logprobs"], generated | loss << 1, spans, prompt_length)
    check(payload, sample.id)
    return payload


def _convert(values: Any, dtype: np.dtype[Any], name: str, sample_id: str) -> Array:
    """Convert to a [L] array of ``dtype``; a value that does not fit is an error, never a wrap-around."""
    if isinstance(values, np.ndarray):
        if values.dtype == dtype and values.ndim == 1 and values.flags.c_contiguous:
            return values
        values = values.tolist()  # numpy would wrap around silently
    try:
        count = len(values)
        # Twice as fast as asarray, and three times for bytes; nothing wraps around.
        packed = bytes(values) if dtype is UINT8 else struct.pack(f"<{count}{dtype.char}", *values)
    except (struct.error, OverflowError, ValueError, TypeError) as exc:
        raise PayloadError(f"sample {sample_id}: {name} does not fit {dtype.name}, one for each token: {exc}.") from exc
    return np.frombuffer(packed, dtype)


def _spans_of(versions: Array) -> tuple[Span, ...]:
    """Return the runs of equal versions, without those of -1."""
    if not len(versions):
        return ()
    ends = [*((versions[1:] != versions[:-1]).nonzero()[0] + 1).tolist(), len(versions)]
    runs = zip([0, *ends], ends, versions[[end - 1 for end in ends]].tolist(), strict=False)
    return tuple([run for run in runs if run[2] >= 0])


def _chunks(payload: Payload) -> Iterator[Any]:
    """Yield the bytes of a payload in pieces, without copies of its arrays."""
    spans = [value for span in payload.spans for value in span]
    head = PRELUDE.pack(MAGIC, len(payload), payload.prompt_length, len(payload.spans))
    pieces: list[Any] = [head + struct.pack(f"<{len(spans)}i", *spans), payload.tokens, payload.logprobs, payload.mask]
    for piece in pieces:
        yield piece
        yield bytes(-memoryview(piece).nbytes % 8)
