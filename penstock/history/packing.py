"""Lossless compression of bytes and arrays of integers.

    squeezed  a byte 0 and the bytes, or a byte 1 and their raw deflate stream
    integers  a byte 0 and the squeezed varints (seven bits a byte, the lowest first; the high bit: more follows), or a
              byte 1, the lengths of four squeezed planes as varints, and these: the first byte of each number, the
              second, ...

Token ids of a text are usually small and repeat, so varints deflate well. The low bytes of other ids do not deflate at
all: planes separate these.
"""

import sqlite3
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ProtocolError
from penstock.payloads.format import MAX_TOKENS, Array

# Texts of token ids, so that a text which its tokens spell is not stored besides them.
#
# A file of a history has the pieces of all ids that occur in it, so it can be read without the model's tokenizer.


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token id."""

    #: UTF-8; a character may be spread over several pieces.
    text: bytes
    #: Part of the text of a prompt but not of an answer: the end of a turn, for example.
    is_special: bool = False


#: Returns the pieces of the token ids that are known. May block for a disk.
LookUp = Callable[[Collection[int]], Mapping[int, Piece]]

#: Most ids whose pieces are cached.
MOST_PIECES = 2**18


class Spelling:
    """Spells token ids; looks up each piece once."""

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        #: Including the text of special tokens, and without it.
        self._whole: dict[int, bytes] = {}
        self._plain: dict[int, bytes] = {}
        self._unknown: set[int] = set()

    def text(self, tokens: Sequence[int], *, special: bool) -> str | None:
        """Return their text; None if the piece of one is not known. ``special``: include special tokens."""
        pieces = self._whole if special else self._plain
        try:
            return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")
        except KeyError:
            pass
        if not self._learn(set(tokens)):
            return None
        return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Collection[int]) -> dict[int, Piece]:
        """Return the pieces of the ids that are known."""
        self._learn(set(tokens))
        return {
            one: Piece(self._whole[one], self._plain[one] != self._whole[one])
            for one in set(tokens)
            if one in self._whole
        }

    def _learn(self, tokens: set[int]) -> bool:
        """Cache the pieces of these ids; return whether all are known."""
        # One by one: subtracting the keys of a map from a set iterates over the complete map.
        missing = {one for one in tokens if one not in self._whole and one not in self._unknown}
        if missing:
            if len(self._whole) + len(self._unknown) + len(missing) > MOST_PIECES:
                self._whole, self._plain, self._unknown, missing = {}, {}, set(), tokens
            found = self._look_up(missing)
            self._whole |= {one: piece.text for one, piece in found.items()}
            self._plain |= {one: b"" if piece.is_special else piece.text for one, piece in found.items()}
            self._unknown |= missing - found.keys()
        return all(one in self._whole for one in tokens)


def nothing_known(tokens: Collection[int]) -> Mapping[int, Piece]:
    """Look up pieces in a run without a tokenizer: none are known."""
    return {}


#: Bytes of a chunk: a page of ``part.PAGE_BYTES`` fits one, as a row.
CHUNK_BYTES = 16_344


class ChunkWriter:
    """Append blocks to the chunks of a file, within its commits.

    A chunk fills one page; blocks stored one by one would leave half of each page empty.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        #: Bytes written; content of the last chunk; bytes that the next ``flush`` writes.
        self._end = 0
        self._tail = b""
        self._pending: list[bytes] = []

    def append(self, data: bytes) -> int:
        """Append ``data``; return the position where it begins."""
        place = self._end
        self._pending.append(data)
        self._end += len(data)
        return place

    def flush(self) -> None:
        """Write what was appended."""
        if not self._pending:
            return
        data = b"".join((self._tail, *self._pending))
        first = (self._end - len(data)) // CHUNK_BYTES
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        self._connection.executemany(
            "INSERT OR REPLACE INTO chunks(n, data) VALUES(?, ?)", list(enumerate(chunks, first))
        )
        self._pending = []
        self._tail = chunks[-1] if len(chunks[-1]) < CHUNK_BYTES else b""

    def recover(self) -> None:
        """Continue after the last commit."""
        found = self._connection.execute("SELECT n, data FROM chunks ORDER BY n DESC LIMIT 1").fetchone()
        number, data = found or (0, b"")
        self._pending, self._end = [], number * CHUNK_BYTES + len(data)
        self._tail = data if len(data) < CHUNK_BYTES else b""


def read_chunks(connection: sqlite3.Connection, begin: int, length: int) -> bytes:
    """Return bytes that were appended. Raises ProtocolError if they are missing, or sqlite3.Error."""
    first, last = begin // CHUNK_BYTES, (begin + max(length, 1) - 1) // CHUNK_BYTES
    rows = connection.execute("SELECT n, data FROM chunks WHERE n BETWEEN ? AND ? ORDER BY n", (first, last)).fetchall()
    if [number for number, _ in rows] != list(range(first, last + 1)) or not all(type(one) is bytes for _, one in rows):
        raise ProtocolError("the bytes of its block are missing.")
    data = b"".join(one for _, one in rows)[begin - first * CHUNK_BYTES :][:length]
    if len(data) != length:
        raise ProtocolError("some bytes of its block are missing.")
    return data


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
