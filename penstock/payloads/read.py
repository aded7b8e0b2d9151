"""Decoding of payload bytes into views, with all checks. See ``payloads``."""

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

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
    check_spans,
    checksum_of,
)
from penstock.records.codec import SKIP_BYTES
from penstock.text import safe_repr

#: All values that a mask may have: tokens that bear loss were generated (T8). And those of generated tokens.
_MASKS = bytes((0, GENERATED, GENERATED | LOSS))
_DRAWN = bytes((GENERATED, GENERATED | LOSS))


def decode(data: bytes | memoryview, sample_id: str, checksum: int | None = None) -> Payload:
    """Decode ``data`` into views without a copy; do not change ``data`` while they are in use.

    Args:
        data: result of ``encode``. Views are aligned when the buffer is (a ``bytes`` always is).
        sample_id: named in errors.
        checksum: expected ``checksum_of`` the bytes; None: not checked.

    Raises:
        PayloadError: the bytes are not a result of ``encode``.
    """
    view = memoryview(data).toreadonly()
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    if checksum is not None and (found := checksum_of(view)) != checksum:
        raise PayloadError(
            f"sample {sample_id}: its payload has checksum {found:#018x} where its record says {checksum:#018x}; "
            "the bytes were changed or are another sample's."
        )
    header, body = _read_header(view, sample_id)
    length: Any = header.get("length")
    prompt: Any = header.get("prompt")
    if not _is_count(length) or length > MAX_TOKENS or not _is_count(prompt) or prompt > length:
        raise PayloadError(f"sample {sample_id}: its payload claims a prompt of {prompt!r} of {length!r} tokens.")
    spans = check_spans(header.get("spans"), length, sample_id)
    entries: Any = header.get("arrays")
    if _is_plain(entries, length, len(view) - body):
        tokens, logprobs, mask = _read_plain(view, length, body)
        sides: dict[str, Array] = {}
    else:
        sides = _read_arrays(view, entries, body, sample_id)
        try:
            tokens, logprobs, mask = [_core(sides, name, length, sample_id) for name in CORE]
        except KeyError as exc:
            raise PayloadError(f"sample {sample_id}: its payload has no array {exc.args[0]!r}.") from exc
    payload = Payload(tokens, logprobs, mask, spans, prompt, sides)
    _check_truth(payload, sample_id)
    return payload


def _check_truth(payload: Payload, sample_id: str) -> None:
    """Check what the loss relies on (T6, T8, I7), as the writer does; raise PayloadError if it does not hold."""
    mask = payload.mask.tobytes()
    if mask.translate(None, _MASKS):
        raise PayloadError(
            f"sample {sample_id}: its mask has undefined bits, or loss on a token that was not generated."
        )
    covered = 0
    for start, end, version in payload.spans:
        if start < payload.prompt_length or mask[start:end].translate(None, _DRAWN):
            raise PayloadError(
                f"sample {sample_id}: version {version} is given to tokens {start} to {end}, not all of them generated."
            )
        covered += end - start
    if mask.find(GENERATED | LOSS) < 0:
        return
    if covered != len(mask) - mask.count(0):
        raise PayloadError(f"sample {sample_id}: it bears loss, but not every generated token has a version.")
    # If one number is not finite, neither is the sum of squares, at a quarter of the cost of checking each.
    with np.errstate(over="ignore"):
        finite = math.isfinite(payload.logprobs.dot(payload.logprobs))
    if not finite and not np.isfinite(payload.logprobs).all():
        raise PayloadError(f"sample {sample_id}: it bears loss, and a logprob of it is not a finite number.")


def _is_plain(entries: Any, length: int, size: int) -> bool:
    """Return whether these are only the arrays that are always present, in the layout of ``encode``."""
    second, third, end = _offsets(length)
    return bool(
        length
        and size == end
        and entries
        == [
            ["tokens", "int32", [length], 0],
            ["logprobs", "float32", [length], second],
            ["mask", "uint8", [length], third],
        ]
    )


def _read_plain(view: memoryview, length: int, body: int) -> tuple[Array, Array, Array]:
    """Read tokens, logprobs and mask of a payload without side arrays: most of them, at a third of the cost."""
    second, third, _ = _offsets(length)
    return (
        np.frombuffer(view, DTYPES["int32"], length, body),
        np.frombuffer(view, DTYPES["float32"], length, body + second),
        np.frombuffer(view, DTYPES["uint8"], length, body + third),
    )


def _offsets(length: int) -> tuple[int, int, int]:
    """Return the offsets of logprobs and mask, and the end of the mask, in bytes from the first token."""
    second = 4 * length + -4 * length % 8
    return second, 2 * second, 2 * second + length + -length % 8


def _read_header(view: memoryview, sample_id: str) -> tuple[Mapping[str, Any], int]:
    """Return the header, and the offset of the arrays."""
    if len(view) < PRELUDE.size:
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes, too few for any.")
    magic, size = PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise PayloadError(f"sample {sample_id}: its payload begins with {magic!r}, not {MAGIC!r}.")
    end = PRELUDE.size + size
    if size > MAX_HEADER_BYTES or end > len(view):
        raise PayloadError(f"sample {sample_id}: a header of {size} bytes in a payload of {len(view)}: it is cut off.")
    try:
        if size > SKIP_BYTES:
            # Limit the buffer: msgpack allocates a list of the claimed length before it reads the entries.
            unpacker = msgpack.Unpacker(max_buffer_size=MAX_HEADER_BYTES, strict_map_key=True, max_ext_len=0)
            unpacker.feed(view[PRELUDE.size : end])
            unpacker.skip()
        header = msgpack.unpackb(view[PRELUDE.size : end], strict_map_key=True, max_ext_len=0)
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
            dtype = DTYPES[dtype_name]
            if name in arrays or not isinstance(name, str):
                raise PayloadError(
                    f"sample {sample_id}: its payload names an array {safe_repr(name)} twice or not at all."
                )
            if not _is_count(offset) or not _is_shape(shape):
                raise PayloadError(
                    f"sample {sample_id}: array {safe_repr(name)} has shape {safe_repr(shape)} at "
                    f"offset {safe_repr(offset)}."
                )
        except KeyError as exc:
            raise PayloadError(
                f"sample {sample_id}: array {safe_repr(entry[0])} has the unknown dtype {safe_repr(entry[1])}."
            ) from exc
        except (TypeError, ValueError) as exc:
            raise PayloadError(f"sample {sample_id}: {safe_repr(entry)} does not describe an array.") from exc
        start, count = body + offset, math.prod(shape)
        end = start + count * dtype.itemsize
        if start < last or start % 8 or end > len(view):
            raise PayloadError(
                f"sample {sample_id}: array {safe_repr(name)} lies at bytes {start} to {end} of {len(view)}: "
                "the payload is cut off, or its arrays overlap."
            )
        array: Array = np.frombuffer(view, dtype, count, start) if count else np.empty(0, dtype)
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        last = end + -end % 8
    if last != len(view):
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes where its header needs {last}.")
    return arrays


def _core(arrays: dict[str, Array], name: str, length: int, sample_id: str) -> Array:
    """Remove one of the arrays that are always present from ``arrays``, and check it."""
    array = arrays.pop(name)
    if array.dtype != DTYPES[CORE[name]]:
        raise PayloadError(f"sample {sample_id}: {name} is {array.dtype}, not {CORE[name]}.")
    if array.shape != (length,):
        raise PayloadError(f"sample {sample_id}: {name} has shape {array.shape} for {length} tokens.")
    return array


def _is_shape(value: Any) -> bool:
    """Return whether a value is a list of counts that numpy accepts as a shape, also if one is 0."""
    if len(value) == 1:
        return _is_count(value[0])
    return (
        type(value) is list
        and len(value) <= MAX_DIMENSIONS
        and all(map(_is_count, value))
        and math.prod(max(1, one) for one in value) < 2**40
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
