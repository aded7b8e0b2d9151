"""Lossless compression of bytes and arrays of integers.

    squeezed  a byte 0 and the bytes, or a byte 1 and their raw deflate stream
    integers  a byte 0 and the squeezed varints (seven bits a byte, the lowest first; the high bit: more follows), or a
              byte 1, the lengths of four squeezed planes as varints, and these: the first byte of each number, the
              second, ...

Token ids of a text are usually small and repeat, so varints deflate well. The low bytes of other ids do not deflate at
all: planes separate these.
"""

import zlib
from typing import Any

import numpy as np

from penstock.errors import ProtocolError
from penstock.payloads.format import MAX_TOKENS, Array

_STORED, _DEFLATED = b"\0", b"\1"
_VARINTS, _PLANES = b"\0", b"\1"
#: Bytes per number from which planes are tried.
_MANY = 2.1
#: Longest varint of 32 bits.
_MOST_BYTES = 5
_LEVEL = 5


def squeeze(data: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15, 9)
    packed = packer.compress(data) + packer.flush()
    return _DEFLATED + packed if len(packed) < len(data) else _STORED + data


def unsqueeze(packed: Any, most: int) -> bytes:
    """Return the original bytes; raise ProtocolError if ``packed`` is invalid, or they are more than ``most``."""
    if not isinstance(packed, bytes) or packed[:1] not in (_STORED, _DEFLATED):
        raise foreign("bytes")
    if packed[:1] == _STORED:
        if len(packed) > most + 1:
            raise foreign("more bytes than it says")
        return packed[1:]
    reader = zlib.decompressobj(-15)
    try:
        data = reader.decompress(packed[1:], most + 1)
    except zlib.error as exc:
        raise foreign("bytes") from exc
    if len(data) > most or not reader.eof or reader.unused_data:
        raise foreign("bytes")
    return data


def pack_integers(values: Array) -> bytes:
    """Pack int32 [L]."""
    found = _VARINTS + squeeze(_varints(values.astype("<i4", copy=False).view("<u4")))
    if len(found) <= _MANY * len(values):
        return found
    return min(found, _PLANES + pack_planes(values.astype("<i4", copy=False)), key=len)


def unpack_integers(packed: Any, count: int) -> Array:
    """Unpack int32 [count]; raise ProtocolError if ``packed`` is invalid."""
    if not isinstance(packed, bytes) or not 0 <= count <= MAX_TOKENS:
        raise foreign("an array")
    if packed[:1] == _PLANES:
        return unpack_planes(packed[1:], count, "<i4")
    if packed[:1] != _VARINTS:
        raise foreign("an array")
    return _integers(unsqueeze(packed[1:], _MOST_BYTES * count), count).view("<i4")


def pack_planes(values: Array) -> bytes:
    """Pack values [L] of four bytes each."""
    planes = values.view(np.uint8).reshape(-1, 4).T
    squeezed = [squeeze(plane.tobytes()) for plane in planes]
    lengths = _varints(np.array([len(plane) for plane in squeezed], "<u4"))
    return b"".join((lengths, *squeezed))


def unpack_planes(packed: bytes, count: int, dtype: str) -> Array:
    """Unpack values [count] of four bytes each; raise ProtocolError if ``packed`` is invalid."""
    lengths, at = [], 0
    for _ in range(4):
        end = next((end for end in range(at, min(at + _MOST_BYTES, len(packed))) if packed[end] < 128), None)
        if end is None:
            raise foreign("an array")
        lengths.append(int(_integers(packed[at : end + 1], 1)[0]))
        at = end + 1
    if len(packed) != at + sum(lengths):
        raise foreign("an array")
    out = np.zeros((count, 4), np.uint8)
    for number, length in enumerate(lengths):
        plane = unsqueeze(packed[at : at + length], count)
        if len(plane) != count:
            raise foreign("an array")
        out[:, number] = np.frombuffer(plane, np.uint8)
        at += length
    return out.reshape(-1).view(dtype)


def run_ends(*columns: Array) -> Array:
    """Return the ends of the runs in which no column [L] changes: int [number of runs], ascending, the last is L."""
    length = len(columns[0])
    if not length:
        return np.zeros(0, np.int64)
    changes = np.zeros(length - 1, bool)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return np.append(np.flatnonzero(changes) + 1, length)


def foreign(what: str) -> ProtocolError:
    return ProtocolError(f"A row of the history holds {what} that penstock did not write.")


def _varints(values: Array) -> bytes:
    """Encode uint32 [L]."""
    shifted = values[:, None] >> (7 * np.arange(_MOST_BYTES, dtype="<u4"))
    there = shifted != 0
    there[:, 0] = True
    groups = (shifted & 127).astype(np.uint8)
    groups[:, :-1] |= there[:, 1:].astype(np.uint8) << 7
    return bytes(groups[there].tobytes())


def _integers(data: bytes, count: int) -> Array:
    """Decode uint32 [count] from as many varints; raise ProtocolError if ``data`` is invalid."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 128)
    if len(ends) != count or (len(raw) and not count) or (count and ends[-1] != len(raw) - 1):
        raise foreign("an array")
    if not count:
        return np.zeros(0, "<u4")
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    if sizes.max() > _MOST_BYTES:
        raise foreign("an array")
    places = np.arange(len(raw)) - np.repeat(starts, sizes)
    values = np.add.reduceat((raw & 127).astype(np.int64) << (7 * places), starts)
    if values.max() >= 2**32:
        raise foreign("an array")
    return values.astype("<u4")
