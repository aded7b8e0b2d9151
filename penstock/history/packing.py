"""Arrays and texts of a row in few bytes, without loss: a logprob that is read is, bit for bit, the one that was drawn.

    numbers   [count, plane 0 .. plane 3], little endian: the first byte of each number, the second, ...; a plane is
              empty where it is all 0, else a byte 0 and the bytes, or a byte 1 and their raw deflate stream
    runs      [value, length, value, length, ...] of equal neighbours: versions and masks
    text      its UTF-8 with a byte 0 before it, or a byte 1 and its raw deflate stream, which may refer to ``near``

The high bytes of token ids and logprobs are alike and deflate well, the low ones do not.
"""

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from penstock.errors import ProtocolError
from penstock.payloads.format import MAX_TOKENS, Array

#: Most bytes of one text.
MAX_TEXT_BYTES = 8 * 1024 * 1024
#: What a deflate stream may refer to.
WINDOW = 32 * 1024

_STORED, _DEFLATED = b"\0", b"\1"
T = TypeVar("T")


def pack_numbers(values: Array) -> list[Any]:
    """int32 or float32 [L] as plain values."""
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T) if len(values) else np.zeros((4, 0), np.uint8)
    return [len(values), *(_squeeze(plane.tobytes()) if plane.any() else b"" for plane in planes)]


def unpack_numbers(packed: Any, dtype: str) -> Array:
    """The array [L] again; ProtocolError where ``packed`` is none. ``dtype``: int32 or float32."""
    if not isinstance(packed, list) or len(packed) != 5 or not _is_count(packed[0]):
        raise _foreign("an array")
    count = packed[0]
    # A claim that no byte stands behind gets no room.
    if count > 0 and not any(packed[1:]) and count > 2**20:
        raise _foreign("an array")
    planes = [_widen(plane, count) for plane in packed[1:]]
    out = np.zeros((count, 4), np.uint8)
    for number, plane in enumerate(planes):
        if plane:
            out[:, number] = np.frombuffer(plane, np.uint8)
    return out.reshape(-1).view(np.dtype(dtype).newbyteorder("<"))


def pack_runs(values: Array) -> list[int]:
    """An array of integers [L] as runs of equal neighbours."""
    if not len(values):
        return []
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    lengths = np.diff(starts, append=len(values))
    flat: list[int] = np.stack((values[starts].astype(np.int64), lengths), axis=1).reshape(-1).tolist()
    return flat


def unpack_runs(packed: Any, dtype: str) -> Array:
    """The array [L] again; ProtocolError where ``packed`` is none, or claims more than ``MAX_TOKENS``."""
    if not isinstance(packed, list) or len(packed) % 2 or not all(type(value) is int for value in packed):
        raise _foreign("runs")
    lengths, limits = packed[1::2], np.iinfo(dtype)
    if any(length < 0 for length in lengths) or sum(lengths) > MAX_TOKENS:
        raise _foreign("runs")
    if any(not limits.min <= value <= limits.max for value in packed[0::2]):
        raise _foreign("runs")
    return np.repeat(np.array(packed[0::2], dtype), lengths)


def pack_text(text: str, near: str = "") -> bytes:
    """``text`` in few bytes; ``near`` is text that it may be like, and must be given again to read it."""
    return _squeeze(text.encode(), near.encode()[-WINDOW:])


def unpack_text(packed: Any, near: str = "") -> str:
    """The text again; ProtocolError where it is none."""
    if not isinstance(packed, bytes) or not packed:
        raise _foreign("a text")
    if packed[:1] == _STORED:
        return _tried(packed[1:].decode, "a text")
    return _tried(lambda: _inflate(packed, near.encode()[-WINDOW:], MAX_TEXT_BYTES).decode(), "a text")


def _squeeze(data: bytes, near: bytes = b"") -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, near) if near else _deflate()
    packed = packer.compress(data) + packer.flush()
    return _DEFLATED + packed if len(packed) < len(data) else _STORED + data


def _deflate() -> Any:
    return zlib.compressobj(6, zlib.DEFLATED, -15, 9)


def _inflate(packed: bytes, near: bytes, most: int) -> bytes:
    reader = zlib.decompressobj(-15, near) if near else zlib.decompressobj(-15)
    data = reader.decompress(packed[1:], most + 1)
    if len(data) > most or not reader.eof:
        raise ValueError("it is longer than it may be, or cut off")
    return data


def _widen(plane: Any, count: int) -> bytes:
    """Bytes of a plane, ``count`` of them, or none."""
    if not isinstance(plane, bytes):
        raise _foreign("an array")
    if not plane:
        return b""
    data = plane[1:] if plane[:1] == _STORED else _tried(lambda: _inflate(plane, b"", count), "an array")
    if len(data) != count:
        raise _foreign("an array")
    return data


def _tried(read: Callable[[], T], what: str) -> T:
    try:
        return read()
    except (ValueError, zlib.error) as exc:
        raise _foreign(what) from exc


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


def _foreign(what: str) -> ProtocolError:
    return ProtocolError(f"A row of the history holds {what} that penstock did not write.")
