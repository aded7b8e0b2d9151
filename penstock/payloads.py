"""The bytes of one sample: packed arrays behind a msgpack header, read without a copy.

    offset 0        magic ``PSP1``
    offset 4        H, length of the header: uint32, little endian
    offset 8        msgpack map {length: L, prompt: P, spans: [start, end, version, ...],
                                 arrays: [[name, dtype, shape, offset], ...]}
    next multiple   arrays, little endian, each at a multiple of 8, zero bytes between; their offsets in the header
    of 8            count from here, so that they do not depend on the length of the header

Always there: ``tokens`` int32 [L], ``logprobs`` float32 [L] and ``mask`` uint8 [L] (bit 0: generated, bit 1: bears
loss). Versions travel as spans, half open, ascending; a token outside every span has version -1. Any further array is
a side array (routed experts, teacher logprobs) and may have any shape. 9 bytes per token.

Everything that is read is bounds checked; what cannot be right raises PayloadError with one sentence that names the
sample. Nothing here blocks.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import PayloadError
from penstock.messages import Sample, SampleMeta

MAGIC = b"PSP1"
#: Most bytes of the header; 64k spans stay below it.
MAX_HEADER_BYTES = 1024 * 1024
#: Most tokens of one sample.
MAX_TOKENS = 64 * 1024 * 1024
#: Most arrays of one payload, the three that are always there included.
MAX_ARRAYS = 64

GENERATED = 1
LOSS = 2

_PRELUDE = struct.Struct("<4sI")
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")
}
_SIZES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
_CORE = {"tokens": "int32", "logprobs": "float32", "mask": "uint8"}

Span = tuple[int, int, int]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Arrays of one sample; read-only views into the bytes they came from, which they keep alive."""

    #: [L] int32, prompt and everything after it.
    tokens: Array
    #: [L] float32, log-probability the token was drawn with; 0 where nothing was drawn (T6).
    logprobs: Array
    #: [L] uint8, bit 0 generated, bit 1 bears loss.
    mask: Array
    #: (start, end, version), half open, ascending, not overlapping.
    spans: tuple[Span, ...]
    prompt_length: int
    #: Further arrays by name.
    sides: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> Array:
        """[L] uint8, 1 on tokens that the policy drew. A new array at every call."""
        return self.mask & GENERATED

    @property
    def loss_mask(self) -> Array:
        """[L] uint8, 1 on tokens to train. A new array at every call."""
        return self.mask >> 1

    @property
    def versions(self) -> Array:
        """[L] int32, version the token was drawn with, -1 where nothing was drawn. A new array at every call."""
        versions = np.full(len(self.tokens), -1, np.int32)
        for start, end, version in self.spans:
            versions[start:end] = version
        return versions


def encode(sample: Sample, sides: Mapping[str, Array] | None = None) -> bytes:
    """Payload bytes of a sample; PayloadError where its lists cannot be true (see ``encode_arrays``)."""
    return encode_arrays(
        sample.tokens,
        sample.logprobs,
        sample.generated,
        sample.loss_mask,
        versions=sample.versions,
        prompt_length=sample.prompt_length,
        sample_id=sample.id,
        sides=sides,
    )


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
    """Payload bytes of arrays or lists of one length L; versions per token, or as spans.

    Numpy arrays of the right dtype (int32, float32, uint8, uint8, int32) are taken without a conversion.

    Raises:
        PayloadError: lengths differ, a value does not fit its dtype, a mask holds anything but 0 and 1, loss on or a
            version of a token that was not drawn; or, in a sample that bears loss, a generated token whose logprob is
            not finite or that has no version.
    """
    payload = _checked(tokens, logprobs, generated, loss_mask, prompt_length, sample_id, versions, spans)
    return _assemble(payload, sample_id, sides or {})


def _checked(
    tokens: ArrayLike,
    logprobs: ArrayLike,
    generated: ArrayLike,
    loss_mask: ArrayLike,
    prompt_length: int,
    sample_id: str,
    versions: ArrayLike | None = None,
    spans: Sequence[Span] | None = None,
) -> Payload:
    token_array = _convert(tokens, "int32", "tokens", sample_id)
    logprob_array = _convert(logprobs, "float32", "logprobs", sample_id)
    generated_array = _convert(generated, "uint8", "generated", sample_id)
    loss_array = _convert(loss_mask, "uint8", "loss_mask", sample_id)
    length = len(token_array)
    if length > MAX_TOKENS:
        raise PayloadError(f"sample {sample_id}: {length} tokens are more than the {MAX_TOKENS} a sample may have.")
    if (versions is None) == (spans is None):
        raise PayloadError(f"sample {sample_id}: give versions per token or as spans, one of the two.")
    if versions is not None:
        version_array = _convert(versions, "int32", "versions", sample_id)
        _check_length("versions", version_array, length, sample_id)
        checked = _spans_of(version_array)
    else:
        flat = [int(value) for span in spans or () for value in span]
        checked = _check_spans(flat, length, sample_id)
    for name, array in (("logprobs", logprob_array), ("generated", generated_array), ("loss_mask", loss_array)):
        _check_length(name, array, length, sample_id)
    if length and int((generated_array | loss_array).max()) > 1:
        raise PayloadError(f"sample {sample_id}: generated and loss_mask may hold 0 and 1 only.")
    _check_truth(generated_array.view(bool), loss_array.view(bool), logprob_array, checked, sample_id)
    return Payload(token_array, logprob_array, generated_array | (loss_array << 1), checked, prompt_length)


def decode(data: bytes | memoryview, sample_id: str, checksum: int | None = None) -> Payload:
    """Views into ``data``, which must stay as it is for as long as they live; nothing is copied.

    Args:
        data: what ``encode`` wrote. Views are aligned when the buffer is (a ``bytes`` always is).
        sample_id: named in errors.
        checksum: CRC-32 of the bytes; None leaves it unchecked.

    Raises:
        PayloadError: the bytes cannot be what ``encode`` wrote.
    """
    view = memoryview(data).toreadonly()
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    if checksum is not None and (found := zlib.crc32(view)) != checksum:
        raise PayloadError(
            f"sample {sample_id}: its payload has CRC-32 {found:#010x} where its record says {checksum:#010x}; "
            "the bytes were changed or are another sample's."
        )
    header, body = _read_header(view, sample_id)
    length: Any = header.get("length")
    prompt: Any = header.get("prompt")
    if not _is_count(length) or length > MAX_TOKENS or not _is_count(prompt) or prompt > length:
        raise PayloadError(f"sample {sample_id}: its payload claims a prompt of {prompt!r} of {length!r} tokens.")
    spans = _check_spans(header.get("spans"), length, sample_id)
    arrays = _read_arrays(view, header.get("arrays"), body, sample_id)
    try:
        tokens, logprobs, mask = [_core(arrays, name, length, sample_id) for name in _CORE]
    except KeyError as exc:
        raise PayloadError(f"sample {sample_id}: its payload has no array {exc.args[0]!r}.") from exc
    if length and int(mask.max()) > GENERATED | LOSS:
        raise PayloadError(f"sample {sample_id}: its mask holds bits that have no meaning.")
    return Payload(tokens, logprobs, mask, spans, prompt, arrays)


def meta_of(
    sample: Sample,
    *,
    token: str,
    server: str,
    data: bytes | memoryview,
    worker: str = "",
    temperature: float | None = None,
    logprob_kind: str = "scaled",
) -> SampleMeta:
    """Record of a finished sample whose payload is ``data``; the bytes are read back, the counts are those of them.

    Args:
        token: lease token under which it will be committed.
        server: name of the payload server that ``data`` was or will be written to.
        temperature: what the engine scaled logprobs by; None takes the job's. At temperature 0 an engine draws
            greedily and reports logprobs at temperature 1, which is what is recorded then.

    Raises:
        PayloadError: the bytes are not this sample's, or the sample has no reward that is a number.
    """
    payload = decode(data, sample.id)
    if len(payload) != len(sample.tokens) or payload.prompt_length != sample.prompt_length:
        raise PayloadError(f"sample {sample.id}: its payload was made before the sample was finished; encode it anew.")
    return _meta_of(sample, payload, token, server, data, worker, temperature, logprob_kind)


def pack(
    sample: Sample,
    *,
    token: str,
    server: str,
    worker: str = "",
    temperature: float | None = None,
    logprob_kind: str = "scaled",
) -> tuple[bytes, SampleMeta]:
    """Payload bytes and record of a finished sample in one pass: ``encode`` and ``meta_of`` without reading back.

    Raises:
        PayloadError: as both.
    """
    payload = _checked(
        sample.tokens,
        sample.logprobs,
        sample.generated,
        sample.loss_mask,
        sample.prompt_length,
        sample.id,
        versions=sample.versions,
    )
    data = _assemble(payload, sample.id, {})
    return data, _meta_of(sample, payload, token, server, data, worker, temperature, logprob_kind)


def _meta_of(
    sample: Sample,
    payload: Payload,
    token: str,
    server: str,
    data: bytes | memoryview,
    worker: str,
    temperature: float | None,
    logprob_kind: str,
) -> SampleMeta:
    if sample.reward is None or not math.isfinite(sample.reward):
        raise PayloadError(f"sample {sample.id}: its reward is {sample.reward}, not a number (T11).")
    if temperature is None:
        temperature = float(sample.job.sampling.get("temperature", 1.0))
    loss_by_version = _loss_by_version(payload)
    versions = [version for _, _, version in payload.spans]
    return SampleMeta(
        k=sample.k,
        token=token,
        server=server,
        checksum=zlib.crc32(data),
        num_bytes=len(data),
        length=len(payload),
        prompt_length=payload.prompt_length,
        num_generated=int(np.count_nonzero(payload.generated)),
        loss_by_version=loss_by_version,
        oldest=min(versions, default=-1),
        newest=max(versions, default=-1),
        reward=float(sample.reward),
        status=sample.status,
        finish_reason=sample.finish_reason,
        reward_info=sample.reward_info,
        worker=worker,
        temperature=temperature or 1.0,
        logprob_kind=logprob_kind,
        num_turns=sample.num_turns,
        num_aborts=sample.num_aborts,
        cached_tokens=sample.cached_tokens,
        started_s=sample.started_s,
        generate_s=sample.generate_s,
        reward_s=sample.reward_s,
    )


def _convert(values: ArrayLike, dtype: str, name: str, sample_id: str) -> Array:
    """[L] array of ``dtype``; a value that does not fit is an error, never a wrap-around."""
    if isinstance(values, np.ndarray):
        if values.dtype == _DTYPES[dtype] and values.ndim == 1 and values.flags.c_contiguous:
            return values
        values = values.tolist()  # numpy would wrap around silently
    try:
        if dtype == "uint8" and isinstance(values, list):
            return np.frombuffer(bytes(values), np.uint8)  # three times as fast as asarray
        if isinstance(values, list) and not any(isinstance(value, list) for value in values[:1]):
            # Twice as fast as asarray, and as strict: nothing wraps around.
            code = "i" if dtype == "int32" else "f"
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), _DTYPES[dtype])
        array = np.asarray(values, _DTYPES[dtype])
    except (struct.error, OverflowError, ValueError, TypeError) as exc:
        raise PayloadError(f"sample {sample_id}: {name} does not fit {dtype}: {exc}.") from exc
    if array.ndim != 1:
        raise PayloadError(f"sample {sample_id}: {name} has {array.ndim} dimensions, not one entry per token.")
    return array


def _check_length(name: str, array: Array, length: int, sample_id: str) -> None:
    if len(array) != length:
        raise PayloadError(f"sample {sample_id}: {len(array)} entries of {name} for {length} tokens.")


def _spans_of(versions: Array) -> tuple[Span, ...]:
    """Runs of equal versions, those of -1 left out."""
    if not len(versions):
        return ()
    edges = [edge + 1 for edge in (versions[1:] != versions[:-1]).nonzero()[0].tolist()]
    pairs = zip([0, *edges], [*edges, len(versions)], strict=True)
    return tuple((start, end, version) for start, end in pairs if (version := int(versions[start])) >= 0)


def _check_spans(flat: Any, length: int, sample_id: str) -> tuple[Span, ...]:
    if not isinstance(flat, list) or len(flat) % 3:
        raise PayloadError(f"sample {sample_id}: its version spans are not triples of start, end and version.")
    last = 0
    spans = []
    for start, end, version in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        if not (type(start) is type(end) is type(version) is int and last <= start < end <= length):
            raise PayloadError(
                f"sample {sample_id}: version span {start!r} to {end!r} is empty, overlaps the one before "
                f"(which ends at {last}), or leaves its {length} tokens."
            )
        if not 0 <= version < 2**31:
            raise PayloadError(f"sample {sample_id}: version {version} is not one (0 to {2**31 - 1}).")
        spans.append((start, end, version))
        last = end
    return tuple(spans)


def _check_truth(generated: Array, loss: Array, logprobs: Array, spans: tuple[Span, ...], sample_id: str) -> None:
    """What the loss relies on: I7, T6 and T8. Both masks are bool here."""
    num_loss, num_generated = np.count_nonzero(loss), np.count_nonzero(generated)
    if np.count_nonzero(generated & loss) != num_loss:
        where = int(np.flatnonzero(loss & ~generated)[0])
        raise PayloadError(f"sample {sample_id}: token {where} bears loss but was not generated (T8).")
    covered = 0
    for start, end, version in spans:
        if np.count_nonzero(generated[start:end]) != end - start:
            raise PayloadError(
                f"sample {sample_id}: version {version} is given to tokens {start} to {end}, not all of them generated."
            )
        covered += end - start
    if not num_loss:
        return
    if covered != num_generated:
        raise PayloadError(f"sample {sample_id}: it bears loss, but not every generated token has a version (I7).")
    if not np.isfinite(logprobs).all():
        where = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise PayloadError(f"sample {sample_id}: the logprob of token {where} is {logprobs[where]}; it bears loss.")


def _assemble(payload: Payload, sample_id: str, sides: Mapping[str, Array]) -> bytes:
    tokens, spans, prompt_length = payload.tokens, payload.spans, payload.prompt_length
    if not 0 <= prompt_length <= len(tokens):
        raise PayloadError(f"sample {sample_id}: a prompt of {prompt_length} of {len(tokens)} tokens.")
    arrays = [("tokens", "int32", tokens), ("logprobs", "float32", payload.logprobs), ("mask", "uint8", payload.mask)]
    for name, array in sides.items():
        dtype = array.dtype.name
        if name in _CORE or dtype not in _DTYPES:
            raise PayloadError(
                f"sample {sample_id}: side array {name!r} of {array.dtype} cannot be stored; "
                f"rename it or convert it to one of {', '.join(_DTYPES)}."
            )
        arrays.append((name, dtype, np.ascontiguousarray(array, _DTYPES[dtype])))
    if len(arrays) > MAX_ARRAYS:
        raise PayloadError(f"sample {sample_id}: {len(arrays)} arrays are more than the {MAX_ARRAYS} allowed.")
    entries = []
    offset = 0
    chunks: list[Any] = []
    for name, dtype, array in arrays:
        size = array.nbytes
        entries.append([name, dtype, list(array.shape), offset])
        pad = -size % 8
        chunks += (array.data if size else b"", bytes(pad))
        offset += size + pad
    flat = [value for span in spans for value in span]
    header = msgpack.packb({"length": len(tokens), "prompt": int(prompt_length), "spans": flat, "arrays": entries})
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadError(f"sample {sample_id}: its {len(spans)} version spans are more than a payload may have.")
    pad = -(len(header) + _PRELUDE.size) % 8
    return b"".join((_PRELUDE.pack(MAGIC, len(header)), header, bytes(pad), *chunks))


def _read_header(view: memoryview, sample_id: str) -> tuple[Mapping[str, Any], int]:
    """The header, and where the arrays begin."""
    if len(view) < _PRELUDE.size:
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes, too few for any.")
    magic, size = _PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise PayloadError(f"sample {sample_id}: its payload begins with {magic!r}, not {MAGIC!r}.")
    end = _PRELUDE.size + size
    if size > MAX_HEADER_BYTES or end > len(view):
        raise PayloadError(f"sample {sample_id}: a header of {size} bytes in a payload of {len(view)}: it is cut off.")
    try:
        header = msgpack.unpackb(view[_PRELUDE.size : end], strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise PayloadError(f"sample {sample_id}: the header of its payload cannot be read: {exc}.") from exc
    if not isinstance(header, dict):
        raise PayloadError(f"sample {sample_id}: the header of its payload is not a map.")
    return header, end + -end % 8


def _read_arrays(view: memoryview, entries: Any, body: int, sample_id: str) -> dict[str, Array]:
    if not isinstance(entries, list) or len(entries) > MAX_ARRAYS:
        raise PayloadError(f"sample {sample_id}: its payload has no list of at most {MAX_ARRAYS} arrays.")
    arrays: dict[str, Array] = {}
    last = body
    for entry in entries:
        try:
            name, dtype_name, shape, offset = entry
            dtype = _DTYPES[dtype_name]
            if name in arrays or not isinstance(name, str):
                raise PayloadError(f"sample {sample_id}: its payload names an array {name!r} twice or not at all.")
            if not _is_count(offset) or not _is_shape(shape):
                raise PayloadError(f"sample {sample_id}: array {name!r} has shape {shape!r} at offset {offset!r}.")
        except KeyError as exc:
            raise PayloadError(f"sample {sample_id}: array {entry[0]!r} has the unknown dtype {entry[1]!r}.") from exc
        except (TypeError, ValueError) as exc:
            raise PayloadError(f"sample {sample_id}: {entry!r} does not describe an array.") from exc
        start, count = body + offset, math.prod(shape)
        end = start + count * _SIZES[dtype_name]
        if start < last or start % 8 or end > len(view):
            raise PayloadError(
                f"sample {sample_id}: array {name!r} lies at bytes {start} to {end} of {len(view)}: "
                "the payload is cut off, or its arrays overlap."
            )
        array: Array = np.frombuffer(view, dtype, count, start) if count else np.empty(0, dtype)
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        last = end + -end % 8
    if last != len(view):
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes where its header needs {last}.")
    return arrays


def _core(arrays: dict[str, Array], name: str, length: int, sample_id: str) -> Array:
    """Take one of the arrays that are always there out of ``arrays``."""
    array = arrays.pop(name)
    if array.dtype != _DTYPES[_CORE[name]]:
        raise PayloadError(f"sample {sample_id}: {name} is {array.dtype}, not {_CORE[name]}.")
    if array.shape != (length,):
        raise PayloadError(f"sample {sample_id}: {name} has shape {array.shape} for {length} tokens.")
    return array


def _loss_by_version(payload: Payload) -> list[list[int]]:
    counts: dict[int, int] = {}
    loss = payload.loss_mask
    for start, end, version in payload.spans:
        if count := int(np.count_nonzero(loss[start:end])):
            counts[version] = counts.get(version, 0) + count
    return [[version, counts[version]] for version in sorted(counts)]


def _is_shape(value: Any) -> bool:
    return _is_count(value[0]) if len(value) == 1 else all(map(_is_count, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
