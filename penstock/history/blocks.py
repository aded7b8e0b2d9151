"""Samples of a job that were written together, as one row of ``blocks``.

Each value is a zstandard frame: ``fields`` a msgpack map of columns, each array the values of all samples, one after
the other. Together they compress better than each alone: answers to one prompt are similar.
"""

import dataclasses
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import zstandard

from penstock.errors import ProtocolError
from penstock.history.row import ARRAYS, COLUMNS, TIMES, SampleRow
from penstock.payloads.format import Array
from penstock.records.codec import MAX_RECORD_BYTES, column_checks_of, pack, unpack_map
from penstock.text import utf8_safe

#: Arrays of longer samples, and the middle of longer texts, are not kept; so no block has arrays of more tokens.
MAX_LENGTH, MAX_CHARS = 4 * 1024 * 1024, 1024 * 1024
#: Most samples of a block, and about the most bytes of all of them: reading one sample reads the fields of its block.
MAX_SAMPLES, MAX_BYTES = 32, 1024 * 1024
#: Level of zstandard; 9 takes four times as long and saves 2 %.
LEVEL = 3

#: Name of an unreadable value in errors.
WHAT = "A row of the history"
#: Later times are invalid: the year 5138.
MAX_TIME_S = 1e11

#: Text of a token id (a character may be spread over several), and whether it is a special token, which is part of the
#: text of a prompt but not of an answer.
Piece = tuple[bytes, bool]
#: Returns the pieces of the token ids that are known. May block for a disk.
LookUp = Callable[[set[int]], Mapping[int, Piece]]

#: Fields of a row that are stored in ``fields``.
FIELDS = tuple(field.name for field in dataclasses.fields(SampleRow) if field.name not in {*COLUMNS, *ARRAYS, "pieces"})
_TEXTS = ("prompt", "answer", "label", "finish_reason", "worker", "tries", "reason")


def blocks_of(rows: Sequence[SampleRow]) -> Iterator[list[SampleRow]]:
    """Split ``rows`` into blocks."""
    block: list[SampleRow] = []
    size = 0
    for row in rows:
        own = 4 * (len(row.answer) + len(row.prompt)) + (0 if row.tokens is None else 14 * len(row.tokens))
        # A reader takes no record with too many values, and a reward may return very many.
        own += len(pack(row.reward_info)) if row.reward_info else 0
        if block and (len(block) == MAX_SAMPLES or size + own > MAX_BYTES):
            yield block
            block, size = [], 0
        block.append(row)
        size += own
    if block:
        yield block


def pack_block(rows: Sequence[SampleRow]) -> list[bytes]:
    """Return ``fields`` and ``ARRAYS`` of a block.

    Raises ValueError if arrays of a row have different lengths, or only some of them exist.
    """
    lengths = [_length_of(row) for row in rows]
    fields = [_fields_of(row, length) for row, length in zip(rows, lengths, strict=True)]
    columns = {name: [one[name] for one in fields] for name in FIELDS} | {"lengths": lengths}
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    kept = [row for row, length in zip(rows, lengths, strict=True) if length >= 0]
    arrays = [
        np.concatenate([np.zeros(0, dtype), *(getattr(row, name) for row in kept)]).astype(dtype, copy=False)
        for name, dtype in ARRAYS.items()
    ]
    # Byte by byte, as Parquet's BYTE_STREAM_SPLIT: the first byte of each value, the second, ...
    split = [array.view("u1").reshape(-1, array.itemsize).T.tobytes() for array in arrays]
    return [compressor.compress(data) for data in (pack(columns), *split)]


def _length_of(row: SampleRow) -> int:
    """Return the tokens of the arrays; -1 if they are not kept."""
    lengths = {-1 if (array := getattr(row, name)) is None else len(array) for name in ARRAYS}
    if len(lengths) > 1:
        raise ValueError(f"Arrays of sample {row.id} have different lengths, or some are missing.")
    length = lengths.pop()
    return length if length <= MAX_LENGTH else -1


def _fields_of(row: SampleRow, length: int) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in FIELDS}
    found |= {name: utf8_safe(found[name], MAX_CHARS) for name in _TEXTS}
    if length < 0:
        found["is_spelled"] = False
    elif row.is_spelled:
        found |= {"prompt": "", "answer": ""}
    return found


class Block:
    """A block that is read. Every method raises ProtocolError if its values are invalid, or sqlite3.Error.

    Args:
        sample: number of any sample of it.
    """

    def __init__(self, connection: sqlite3.Connection, sample: int) -> None:
        self._connection = connection
        found = connection.execute(
            "SELECT b, fields FROM blocks WHERE b <= ? ORDER BY b DESC LIMIT 1", (sample,)
        ).fetchone()
        if found is None or type(found[0]) is not int:
            raise ProtocolError("it is in no block.")
        #: Number of its first sample.
        self.first, fields = found
        self._columns = unpack_map(_decompressed(fields, MAX_RECORD_BYTES), WHAT)
        self._lengths = self._columns.pop("lengths", None)
        self._check()
        self._arrays: dict[str, list[Array]] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def fields(self, at: int, look_up: LookUp, *, arrays: bool) -> dict[str, Any]:
        """Return the ``at``-th sample's fields that are not columns, by name; with its arrays only if ``arrays``."""
        if not 0 <= at < len(self):
            raise ProtocolError(f"{WHAT} is not in its block.")
        found = {name: values[at] for name, values in self._columns.items()}
        # A time in a record may be any number.
        found |= {name: found[name] if 0 < found[name] < MAX_TIME_S else 0.0 for name in TIMES}
        if self._lengths[at] < 0 or not (arrays or found["is_spelled"]):
            return found
        tokens = self._array("tokens")[at]
        pieces = look_up(set(tokens.tolist()))
        if found["is_spelled"]:
            prompt, answer = np.split(tokens, [found["prompt_length"]])
            found |= {"prompt": _text(prompt, pieces, special=True), "answer": _text(answer, pieces, special=False)}
        if arrays:
            found |= {name: self._array(name)[at] for name in ARRAYS}
            found["pieces"] = {token: piece for token, (piece, _) in pieces.items()}
        return found

    def _check(self) -> None:
        """Raise ProtocolError if its columns have other names, types or lengths than penstock writes."""
        lengths, checks = self._lengths, column_checks_of(SampleRow)
        if type(lengths) is not list or set(map(type, lengths)) != {int} or min(lengths) < -1:
            raise ProtocolError(f"{WHAT} has arrays that no row has.")
        if sum(lengths) > MAX_LENGTH:
            raise ProtocolError(f"{WHAT} has longer arrays than penstock writes.")
        if self._columns.keys() != set(FIELDS):
            raise ProtocolError(f"{WHAT} has other fields than this version of penstock writes.")
        for name, values in self._columns.items():
            if not checks[name](values) or len(values) != len(lengths):
                raise ProtocolError(f"{WHAT} has values of {name} that no row has.")

    def _array(self, name: str) -> list[Array]:
        """Return an array of each sample."""
        if name not in self._arrays:
            found = self._connection.execute(f"SELECT {name} FROM blocks WHERE b = ?", (self.first,)).fetchone()
            dtype, counts = np.dtype(ARRAYS[name]), [max(0, length) for length in self._lengths]
            data = _decompressed(found and found[0], sum(counts) * dtype.itemsize)
            if len(data) != sum(counts) * dtype.itemsize:
                raise ProtocolError(f"{WHAT} has {name} of another length.")
            joined = np.frombuffer(data, "u1").reshape(dtype.itemsize, -1).T.tobytes()
            self._arrays[name] = np.split(np.frombuffer(joined, dtype), list(accumulate(counts))[:-1])
        return self._arrays[name]


def _decompressed(data: Any, most: int) -> bytes:
    """Return the content of a frame; raise ProtocolError if it is invalid, or more than ``most`` bytes."""
    try:
        if type(data) is not bytes or not 0 <= zstandard.frame_content_size(data) <= most:
            raise ProtocolError(f"{WHAT} holds bytes that penstock did not write.")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise ProtocolError(f"{WHAT} holds bytes that penstock did not write: {exc}.") from exc


def _text(tokens: Array, pieces: Mapping[int, Piece], *, special: bool) -> str:
    """Return the text of tokens, with or without special ones; raise ProtocolError if one is unknown."""
    try:
        known = [pieces[token] for token in tokens.tolist()]
    except KeyError as exc:
        raise ProtocolError(f"{WHAT} has tokens whose text is missing.") from exc
    text = b"".join(piece for piece, is_special in known if special or not is_special)
    return utf8_safe(text.decode("utf-8", "replace"), MAX_CHARS)
