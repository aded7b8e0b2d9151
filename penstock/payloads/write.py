"""Encoding of payload bytes: samples are checked for what the loss relies on, then packed. See ``payloads``.

Samples that are committed together are checked in one pass over their joined arrays: an array operation on one sample
of 2,560 tokens costs half of what it costs on eight.
"""

import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np
from numpy.typing import ArrayLike

from penstock.config.sampling import logprob_temperature, temperature_of
from penstock.errors import PayloadError
from penstock.payloads.format import (
    CORE,
    DTYPES,
    GENERATED,
    LOSS,
    MAGIC,
    MAX_ARRAYS,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_TOKENS,
    PRELUDE,
    Array,
    Payload,
    Span,
    check_spans,
    checksum_of,
    sum_runs,
)
from penstock.records.sample import Sample
from penstock.records.sample_meta import MAX_PARTS, Part, SampleMeta
from penstock.text import safe_repr

#: Most characters of a job's label that are stored with its first sample.
MAX_LABEL = 1024
#: Argument type of ``bytes.join``.
_Chunk = bytes | Array
#: Zero bytes for padding, by number.
_ZEROS = [bytes(count) for count in range(8)]
_BOTH = np.uint8(GENERATED | LOSS)


# Neither is frozen, since creating a frozen instance takes three times as long, for every sample. Do not change them.
@dataclass(slots=True, eq=False)
class _Raw:
    """Arrays of one sample, converted and of one length L, not checked yet."""

    sample: str
    prompt_length: int
    tokens: Array
    logprobs: Array
    generated: Array
    loss_mask: Array
    versions: Array


@dataclass(slots=True, eq=False)
class _Checked:
    """A checked sample, and the counts for its record."""

    payload: Payload
    num_generated: int
    loss_by_version: list[list[int]]


def encode(sample: Sample, sides: Mapping[str, Array] | None = None) -> bytes:
    """Encode a sample; raise PayloadError if its lists are inconsistent (see ``encode_arrays``)."""
    (checked,) = _check([_raw_of(sample)])
    return _joined(checked.payload, sample.id, sides or {})


def encode_arrays(
    tokens: ArrayLike,
    logprobs: ArrayLike,
    generated: ArrayLike,
    loss_mask: ArrayLike,
    *,
    prompt_length: int,
    sample_id: str,
    versions: ArrayLike | None = None,
    spans: Sequence[Span] | None = None,
    sides: Mapping[str, Array] | None = None,
) -> bytes:
    """Encode arrays or lists of one length L; versions per token, or as spans.

    Numpy arrays of the right dtype (int32, float32, uint8, uint8, int32) are not converted.

    Raises:
        PayloadError: lengths differ, a value does not fit its dtype, a mask holds anything but 0 and 1, a token that
        was not
            generated has loss or a version; or, in a sample that bears loss, a generated token whose logprob is
            not finite or that has no version.
    """
    if (versions is None) == (spans is None):
        raise PayloadError(f"sample {sample_id}: give versions per token or as spans, one of the two.")
    if versions is None:
        versions = _versions_of(spans or (), len(np.asarray(tokens)), sample_id)
    raw = _convert_all(sample_id, prompt_length, tokens, logprobs, generated, loss_mask, versions)
    (checked,) = _check([raw])
    return _joined(checked.payload, sample_id, sides or {})


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
        PayloadError: a sample's arrays are inconsistent (see ``encode_arrays``), or its reward is not a number.
    """
    checked = _check([_raw_of(sample) for sample in samples])
    chunks: list[_Chunk] = []
    sizes = [_add_chunks(chunks, one.payload, sample.id, {}) for sample, one in zip(samples, checked, strict=True)]
    data = b"".join(chunks)  # type: ignore[arg-type]  # arrays are buffers
    view, begin = memoryview(data), 0
    metas, now = [], time.time()
    for sample, one, size in zip(samples, checked, sizes, strict=True):
        checksum = checksum_of(view[begin : begin + size])
        shared = [samples[0].k, begin, len(data)] if len(samples) > 1 else []
        scale = logprob_temperature(temperature_of(sample.job.sampling) if temperature is None else temperature)
        payload = one.payload
        versions = [version for _, _, version in payload.spans]
        oldest, newest = min(versions, default=-1), max(versions, default=-1)
        # Positional, in the order of SampleMeta: keywords take five times as long, for every sample.
        metas.append(
            SampleMeta(
                sample.k, token, server, checksum, size, len(payload), payload.prompt_length, one.num_generated,
                scale, one.loss_by_version, oldest, newest, _reward(sample), sample.status, sample.finish_reason,
                sample.reward_info, [], worker, shared, logprob_kind, sample.num_turns, sample.num_aborts,
                sample.cached_tokens, sample.started_s, sample.generate_s, sample.reward_s, sample.num_unproven, now,
                "" if sample.k else sample.job.label[:MAX_LABEL], sample.pauses, sample.first_token_s,
                sample.drawn_s, [] if sample.parts == [] else _parts_of(sample, payload),
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
    counts: dict[int, int] = {}
    for start, end, version in payload.spans:
        if bearing := int(np.count_nonzero(payload.mask[start:end] & LOSS)):
            counts[version] = counts.get(version, 0) + bearing
    versions = [version for _, _, version in payload.spans]
    return Part(
        length=len(payload),
        prompt_length=payload.prompt_length,
        num_generated=int(np.count_nonzero(payload.generated)),
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        loss_by_version=[[version, counts[version]] for version in sorted(counts)],
    )


def _reward(sample: Sample) -> float:
    if sample.reward is None or not math.isfinite(sample.reward):
        raise PayloadError(f"sample {sample.id}: its reward is {sample.reward}, not a number.")
    return float(sample.reward)


def _raw_of(sample: Sample) -> _Raw:
    return _convert_all(
        sample.id,
        sample.prompt_length,
        sample.tokens,
        sample.logprobs,
        sample.generated,
        sample.loss_mask,
        sample.versions,
    )


def _convert_all(
    sample_id: str,
    prompt_length: int,
    tokens: ArrayLike,
    logprobs: ArrayLike,
    generated: ArrayLike,
    loss_mask: ArrayLike,
    versions: ArrayLike,
) -> _Raw:
    raw = _Raw(
        sample_id,
        prompt_length,
        _convert(tokens, "int32", "tokens", sample_id),
        _convert(logprobs, "float32", "logprobs", sample_id),
        _convert(generated, "uint8", "generated", sample_id),
        _convert(loss_mask, "uint8", "loss_mask", sample_id),
        _convert(versions, "int32", "versions", sample_id),
    )
    length = len(raw.tokens)
    if length > MAX_TOKENS:
        raise PayloadError(f"sample {sample_id}: {length} tokens are more than the {MAX_TOKENS} a sample may have.")
    if not 0 <= prompt_length <= length:
        raise PayloadError(f"sample {sample_id}: a prompt of {prompt_length} of {length} tokens.")
    if not len(raw.logprobs) == len(raw.generated) == len(raw.loss_mask) == len(raw.versions) == length:
        name, array = next(
            (name, array)
            for name in ("logprobs", "generated", "loss_mask", "versions")
            if len(array := getattr(raw, name)) != length
        )
        raise PayloadError(f"sample {sample_id}: {len(array)} entries of {name} for {length} tokens.")
    return raw


def _convert(values: ArrayLike, dtype: str, name: str, sample_id: str) -> Array:
    """Convert to a [L] array of ``dtype``; a value that does not fit is an error, never a wrap-around."""
    if isinstance(values, np.ndarray):
        if values.dtype == DTYPES[dtype] and values.ndim == 1 and values.flags.c_contiguous:
            return values
        values = values.tolist()  # numpy would wrap around silently
    try:
        if dtype == "uint8" and isinstance(values, list):
            return np.frombuffer(bytes(values), np.uint8)  # three times as fast as asarray
        if isinstance(values, list) and not any(isinstance(value, list) for value in values[:1]):
            # Twice as fast as asarray, and as strict: nothing wraps around.
            code = "i" if dtype == "int32" else "f"
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), DTYPES[dtype])
        array = np.asarray(values, DTYPES[dtype])
    except (struct.error, OverflowError, ValueError, TypeError) as exc:
        raise PayloadError(f"sample {sample_id}: {name} does not fit {dtype}: {exc}.") from exc
    if array.ndim != 1:
        raise PayloadError(f"sample {sample_id}: {name} has {array.ndim} dimensions, not one entry per token.")
    return array


def _versions_of(spans: Sequence[Span], length: int, sample_id: str) -> Array:
    """Return the [L] int32 version of each token, -1 outside every span."""
    versions = np.full(length, -1, np.int32)
    for start, end, version in check_spans([int(value) for span in spans for value in span], length, sample_id):
        versions[start:end] = version
    return versions


def _join(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _check(raws: Sequence[_Raw]) -> list[_Checked]:
    """Check what the loss relies on, I7, T6 and T8; raise PayloadError if it does not hold."""
    ends = list(accumulate(len(raw.tokens) for raw in raws))
    generated = _join([raw.generated for raw in raws])
    loss = _join([raw.loss_mask for raw in raws])
    # As bytes: comparing them takes a tenth of the time of array operations.
    drawn, bearing = generated.tobytes(), loss.tobytes()
    same = drawn == bearing
    if generated.max(initial=0) > 1 or (not same and loss.max(initial=0) > 1):
        where = int(np.flatnonzero((generated | loss) > 1)[0])
        raise PayloadError(f"sample {_whose(raws, ends, where)[0]}: generated and loss_mask may hold 0 and 1 only.")
    if not same and (loss > generated).any():
        sample, where = _whose(raws, ends, int(np.flatnonzero(loss > generated)[0]))
        raise PayloadError(f"sample {sample}: token {where} bears loss but was not generated.")
    mask = generated * _BOTH if same else generated | (loss << 1)
    starts, versions = _runs(_join([raw.versions for raw in raws]), ends)
    num_drawn = sum_runs(generated, starts)
    num_bearing = num_drawn if same else sum_runs(loss, starts)
    logprobs = _join([raw.logprobs for raw in raws])
    # If one number is not finite, neither is the sum of squares, at a quarter of the cost of checking each.
    finite = math.isfinite(logprobs.dot(logprobs))
    out: list[_Checked] = []
    run = begin = 0
    for raw, end in zip(raws, ends, strict=True):
        last = run
        while last < len(starts) and starts[last] < end:
            last += 1
        stops = [*starts[run + 1 : last], end]
        runs = [
            (starts[i] - begin, stop - begin, versions[i], num_drawn[i], num_bearing[i])
            for i, stop in zip(range(run, last), stops, strict=False)
        ]
        out.append(_check_one(raw, mask[begin:end], runs, finite))
        run, begin = last, end
    return out


def _check_one(raw: _Raw, mask: Array, runs: Sequence[tuple[int, int, int, int, int]], finite: bool) -> _Checked:
    """Check one sample; ``runs``: (start, end, version, generated, loss tokens) of equal versions, end to end."""
    spans: list[Span] = []
    counts: dict[int, int] = {}
    covered = num_generated = num_loss = 0
    for start, end, version, drawn, bearing in runs:
        num_generated += drawn
        num_loss += bearing
        if version < 0:
            continue
        if drawn != end - start:
            raise PayloadError(
                f"sample {raw.sample}: version {version} is given to tokens {start} to {end}, "
                "not all of them generated."
            )
        covered += drawn
        spans.append((start, end, version))
        if bearing:
            counts[version] = counts.get(version, 0) + bearing
    if spans and spans[0][0] < raw.prompt_length:
        raise PayloadError(
            f"sample {raw.sample}: token {spans[0][0]} has version {spans[0][2]}, but it is one of the prompt's "
            f"{raw.prompt_length}: the policy did not generate it."
        )
    if num_loss and covered != num_generated:
        raise PayloadError(f"sample {raw.sample}: it bears loss, but not every generated token has a version (I7).")
    if num_loss and not finite and not np.isfinite(raw.logprobs).all():
        where = int(np.flatnonzero(~np.isfinite(raw.logprobs))[0])
        raise PayloadError(
            f"sample {raw.sample}: the logprob of token {where} is {raw.logprobs[where]}; it bears loss."
        )
    payload = Payload(raw.tokens, raw.logprobs, mask, tuple(spans), raw.prompt_length)
    return _Checked(payload, num_generated, [[version, counts[version]] for version in sorted(counts)])


def _runs(versions: Array, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the starts of runs of equal versions, each within one sample, and the version of each."""
    if not len(versions):
        return [], []
    begins = np.empty(len(versions), np.bool_)
    np.not_equal(versions[1:], versions[:-1], out=begins[1:])
    begins[[0, *(end for end in ends if end < len(versions))]] = True
    starts = begins.nonzero()[0]
    return starts.tolist(), versions[starts].tolist()


def _whose(raws: Sequence[_Raw], ends: Sequence[int], at: int) -> tuple[str, int]:
    """Return the sample of token ``at`` of the joined arrays, and the token's index in it."""
    i = next(i for i, end in enumerate(ends) if at < end)
    return raws[i].sample, at - (ends[i] - len(raws[i].tokens))


def _joined(payload: Payload, sample_id: str, sides: Mapping[str, Array]) -> bytes:
    chunks: list[_Chunk] = []
    _add_chunks(chunks, payload, sample_id, sides)
    return b"".join(chunks)  # type: ignore[arg-type]  # arrays are buffers


def _add_chunks(chunks: list[_Chunk], payload: Payload, sample_id: str, sides: Mapping[str, Array]) -> int:
    """Append the payload's bytes in pieces to ``chunks``; return their number, a multiple of 8."""
    arrays = [payload.tokens, payload.logprobs, payload.mask]
    entries, pads, size = _layout(len(payload))
    if sides:
        entries, pads = list(entries), list(pads)
        for name, dtype, array in _sides(sides, sample_id):
            entries.append([name, dtype, list(array.shape), size])
            pads.append(-array.nbytes % 8)
            size += array.nbytes + pads[-1]
            arrays.append(array)
    flat = [value for span in payload.spans for value in span]
    header = msgpack.packb(
        {"length": len(payload), "prompt": int(payload.prompt_length), "spans": flat, "arrays": entries}
    )
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadError(
            f"sample {sample_id}: its {len(payload.spans)} version spans are more than a payload may have."
        )
    head = PRELUDE.pack(MAGIC, len(header)) + header + _ZEROS[-(len(header) + PRELUDE.size) % 8]
    chunks.append(head)
    for array, pad in zip(arrays, pads, strict=True):
        chunks.append(array)
        if pad:
            chunks.append(_ZEROS[pad])
    return len(head) + size


@lru_cache(maxsize=1024)
def _layout(length: int) -> tuple[Sequence[Any], Sequence[int], int]:
    """Lay out the arrays of a payload of ``length`` tokens: entries in the header, padding of each, total bytes."""
    entries, pads, size = [], [], 0
    for name, dtype in (("tokens", "int32"), ("logprobs", "float32"), ("mask", "uint8")):
        entries.append([name, dtype, [length], size])
        num_bytes = length * DTYPES[dtype].itemsize
        pads.append(-num_bytes % 8)
        size += num_bytes + pads[-1]
    return entries, pads, size


def _sides(sides: Mapping[str, Array], sample_id: str) -> list[tuple[str, str, Array]]:
    checked = []
    for name, array in sides.items():
        dtype = array.dtype.name
        if name in CORE or dtype not in DTYPES:
            raise PayloadError(
                f"sample {sample_id}: side array {name!r} of {array.dtype} cannot be stored; "
                f"rename it or convert it to one of {', '.join(DTYPES)}."
            )
        if array.ndim > MAX_DIMENSIONS:
            raise PayloadError(
                f"sample {sample_id}: side array {name!r} has {array.ndim} dimensions, more than the {MAX_DIMENSIONS} "
                "allowed: flatten it."
            )
        checked.append((name, dtype, np.ascontiguousarray(array, DTYPES[dtype])))
    if len(CORE) + len(checked) > MAX_ARRAYS:
        raise PayloadError(
            f"sample {sample_id}: {len(CORE) + len(checked)} arrays are more than the {MAX_ARRAYS} allowed."
        )
    return checked
