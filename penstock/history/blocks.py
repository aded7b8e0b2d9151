"""Samples of a job that were written together, as three values: their fields, their tokens, their logprobs.

Together they compress much better than each alone: answers to one prompt are similar.
"""

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ProtocolError
from penstock.history.bodies import MAX_LENGTH, WHAT, Body, Group, body_from, body_of, fields_of, values
from penstock.history.packing import (
    Spelling,
    foreign,
    pack_integers,
    pack_planes,
    read_chunks,
    run_ends,
    squeeze,
    unpack_integers,
    unpack_planes,
    unsqueeze,
)
from penstock.history.row import SampleRow
from penstock.payloads.format import MAX_TOKENS, Array
from penstock.records.codec import MAX_ITEMS, MAX_RECORD_BYTES, pack, unpack

_CLASSES, _PLANES = b"\0", b"\1"
_LENGTH = struct.Struct("<I")
#: First class of values near 0, and most bits of k: so -log(1 - k / 2^24) is below 2^-5.
_NEAR, _MOST_BITS = 192, 19
_MANTISSA, _SIGN, _MANTISSA_BITS = 2**23 - 1, 2**31, 23
#: Number of bits that follow, by class; -1 for invalid classes.
_WIDTHS = np.full(256, -1, np.int64)
_WIDTHS[:2] = 0
_WIDTHS[2:_NEAR] = _MANTISSA_BITS
_WIDTHS[_NEAR : _NEAR + 3 * _MOST_BITS] = np.tile(np.arange(_MOST_BITS), 3)
_COLUMNS = np.arange(32)


def pack_logprobs(values: Array) -> bytes:
    """Pack log-probabilities, float32 [L], without loss.

    An engine computes the float32 logarithm of a float32 probability. Near 1 few such probabilities exist, all equal to
    1 - k / 2^24 for an integer k: if the logarithm is that of such a probability, or one of its two neighbours in
    float32, only k is stored.

        class     a byte each: 0 for 0, 1 for -0; 2 to 191 the exponent of a number that is stored unchanged; then, for
                  each of three neighbours (the next smaller magnitude, itself, the next greater), the bits of k minus 1
        bits      back to back, the lowest first: the 23 of a mantissa, or those of k except the highest

        packed    a byte 0, then length of the squeezed classes (four bytes, little endian), these, and the bits; or a
                  byte 1 and planes, if a value has another form (above 0, below -2^65, subnormal, NaN)
    """
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    exponents, is_zero = bits >> _MANTISSA_BITS & 255, bits & (_SIGN - 1) == 0
    if ((exponents >= _NEAR) | ((bits < _SIGN) | (exponents < 2)) & ~is_zero).any():
        return _PLANES + pack_planes(bits)
    whole = _whole_of(values)
    ahead = (bits & (_SIGN - 1)).astype(np.int64) - _magnitudes(whole)
    is_near = (whole > 0) & (whole < 2**_MOST_BITS) & (np.abs(ahead) <= 1)
    sizes = np.frexp(whole.astype(np.float64))[1].astype(np.int64)
    classes = np.where(is_near, _NEAR + (ahead + 1) * _MOST_BITS + sizes - 1, exponents)
    classes = np.where(is_zero, bits >> 31, classes).astype(np.uint8)
    rest = np.where(is_near, whole - (1 << np.maximum(sizes - 1, 0)), bits & _MANTISSA).astype("<u4")
    packed = squeeze(classes.tobytes())
    return b"".join((_CLASSES, _LENGTH.pack(len(packed)), packed, _narrow(rest, _WIDTHS[classes])))


def unpack_logprobs(packed: Any, count: int) -> Array:
    """Unpack float32 [count]; raise ProtocolError if ``packed`` is invalid."""
    if not isinstance(packed, bytes) or not 0 <= count <= MAX_TOKENS:
        raise foreign("logprobs")
    if packed[:1] == _PLANES:
        return unpack_planes(packed[1:], count, "<f4")
    if packed[:1] != _CLASSES or len(packed) < 1 + _LENGTH.size:
        raise foreign("logprobs")
    begin = 1 + _LENGTH.size
    end = begin + _LENGTH.unpack_from(packed, 1)[0]
    classes = np.frombuffer(unsqueeze(packed[begin:end], count), np.uint8)
    widths = _WIDTHS[classes]
    if len(classes) != count or (widths < 0).any():
        raise foreign("logprobs")
    rest = _wide(packed[end:], widths)
    sizes = np.maximum(widths, 0)
    near = (classes.astype(np.int64) - _NEAR) // _MOST_BITS - 1
    is_near, is_zero = classes >= _NEAR, classes < 2
    whole = np.where(is_near, rest + (1 << sizes), 0)
    kept = classes.astype(np.int64) << _MANTISSA_BITS | rest | _SIGN
    bits = np.where(is_near, _magnitudes(whole) + near | _SIGN, kept)
    bits = np.where(is_zero, classes.astype(np.int64) << 31, bits)
    return bits.astype("<u4").view("<f4")


def _whole_of(values: Array) -> Array:
    """Return k of each value, int64 [L]; 0 if it has none. Readers do not recompute it."""
    near = np.maximum(values.astype(np.float64), -(2.0**-4))
    return np.rint(-np.expm1(near) * 2.0**24).astype(np.int64)


def _magnitudes(whole: Array) -> Array:
    """Return -log(1 - k / 2^24) as the bits of float32, int64 [L].

    Uses only additions and multiplications, which give the same result on every machine; a library's logarithm may not.
    """
    x = whole * 2.0**-24
    series = x / 6.0
    for divisor in (5.0, 4.0, 3.0, 2.0, 1.0):
        series = x * (1.0 / divisor + series)
    return series.astype("<f4").view("<u4").astype(np.int64)


def _narrow(values: Array, widths: Array) -> bytes:
    """Concatenate the low bits of uint32 [L], ``widths`` bits of each."""
    spread = np.unpackbits(values.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(spread[widths[:, None] > _COLUMNS], bitorder="little").tobytes()


def _wide(packed: bytes, widths: Array) -> Array:
    """Undo ``_narrow``; return int64 [L]."""
    total = int(widths.sum())
    if len(packed) != (total + 7) // 8:
        raise foreign("logprobs")
    spread = np.zeros((len(widths), 32), np.uint8)
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=total, bitorder="little")
    spread[widths[:, None] > _COLUMNS] = flat
    return np.packbits(spread, axis=1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)


#: Most samples of a block, and about the most bytes of all of them: reading one sample reads its complete block.
MAX_SAMPLES, MAX_BYTES = 32, 1024 * 1024

_NONE = np.zeros(0, "<i4")
#: Arrays of a row, one value per token.
ARRAYS = ("tokens", "logprobs", "versions", "generated", "loss_mask")


class Packed(NamedTuple):
    """A block as bytes."""

    #: The ``Body`` of each sample, and whether logprobs are those of generated tokens only.
    bodies: bytes
    tokens: bytes
    logprobs: bytes


def blocks_of(rows: Sequence[SampleRow]) -> Iterator[list[SampleRow]]:
    """Split ``rows`` into blocks."""
    block: list[SampleRow] = []
    size = 0
    for row in rows:
        own = 4 * (len(row.answer) + len(row.prompt)) + (0 if row.tokens is None else 9 * len(row.tokens))
        if block and (len(block) == MAX_SAMPLES or size + own > MAX_BYTES):
            yield block
            block, size = [], 0
        block.append(row)
        size += own
    if block:
        yield block


def pack_block(rows: Sequence[SampleRow], group: Group, spelling: Spelling) -> Packed:
    """Pack a block. Raises ValueError if arrays of a row have different lengths, or only some of them exist."""
    kept = [_is_kept(row) for row in rows]
    own = [_own_tokens(row, group) if there else None for row, there in zip(rows, kept, strict=True)]
    marked = [row for row, there in zip(rows, kept, strict=True) if there]
    marks = iter(_marks(marked))
    bodies = [
        values(body_of(row, group, spelling, tokens, None if tokens is None else next(marks)))
        for row, tokens in zip(rows, own, strict=True)
    ]
    generated, logprobs = _joined(marked, "generated", "u1"), _joined(marked, "logprobs", "<f4")
    of_drawn = not logprobs[generated == 0].view("<u4").any()
    return Packed(
        squeeze(pack([of_drawn, bodies])),
        pack_integers(np.concatenate([_NONE, *(one for one in own if one is not None)])),
        pack_logprobs(logprobs[generated != 0] if of_drawn else logprobs),
    )


class Block:
    """A block that is read. Every method raises ProtocolError if its bytes are invalid."""

    def __init__(self, packed: Packed, group: Group) -> None:
        self._packed = packed
        self._group = group
        found = unpack(unsqueeze(packed.bodies, MAX_RECORD_BYTES), WHAT)
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
            raise ProtocolError(f"{WHAT} is not what this version of penstock writes.")
        self._of_drawn = found[0] is True
        self.bodies = [body_from(one) for one in found[1]]
        self._lengths = [_length_of(body, group) for body in self.bodies]
        if sum(self._lengths) > MAX_LENGTH:
            raise ProtocolError(f"{WHAT} has longer arrays than penstock writes.")
        self._tokens: list[Array] | None = None
        self._logprobs: list[Array] | None = None

    def fields(self, at: int, spelling: Spelling, *, arrays: bool) -> dict[str, Any]:
        """Return the ``at``-th sample's fields that are not searched, by name; None for its arrays without
        ``arrays``."""
        if not 0 <= at < len(self.bodies):
            raise ProtocolError(f"{WHAT} is not in its block.")
        body = self.bodies[at]
        is_kept = body.num_tokens is not None
        tokens = self._tokens_of(at) if is_kept and (arrays or body.answer is None) else None
        found = fields_of(body, self._group, spelling, tokens)
        if tokens is None or not arrays:
            return found
        versions, generated, loss_mask = _unmarked(body)
        pieces = spelling.pieces(tokens.tolist())
        return found | {
            "tokens": tokens,
            "logprobs": self._logprobs_of(at, generated),
            "versions": versions,
            "generated": generated,
            "loss_mask": loss_mask,
            "pieces": {one: piece.text for one, piece in pieces.items()},
        }

    def _tokens_of(self, at: int) -> Array:
        if self._tokens is None:
            counts = [body.num_tokens or 0 for body in self.bodies]
            self._tokens = _split(unpack_integers(self._packed.tokens, sum(counts)), counts)
        own, shared = self._tokens[at], self._group.tokens
        if not self.bodies[at].shares_tokens or shared is None:
            return own
        return np.concatenate((shared, own))

    def _logprobs_of(self, at: int, generated: Array) -> Array:
        if self._logprobs is None:
            counts = [_num_drawn(body) for body in self.bodies] if self._of_drawn else self._lengths
            self._logprobs = _split(unpack_logprobs(self._packed.logprobs, sum(counts)), counts)
        if not self._of_drawn:
            return self._logprobs[at]
        found = np.zeros(len(generated), np.float32)
        found[generated != 0] = self._logprobs[at]
        return found


def read_block(connection: sqlite3.Connection, sample: int, group: Group, *, logprobs: bool) -> tuple[int, Block]:
    """Read the block of a sample; return it with the number of its first sample.

    Raises:
        ProtocolError: the block is missing or invalid.
        sqlite3.Error: the file cannot be read.
    """
    found = connection.execute(
        "SELECT b, place, bodies, tokens, logprobs FROM blocks WHERE b <= ? ORDER BY b DESC LIMIT 1", (sample,)
    ).fetchone()
    if found is None or not all(type(one) is int and 0 <= one < 2**62 for one in found):
        raise ProtocolError("it is in no block.")
    first, place, *sizes = found
    wanted = sizes if logprobs else [*sizes[:2], 0]
    data = read_chunks(connection, place, sum(wanted))
    ends = [0, *accumulate(wanted)]
    return first, Block(Packed(*(data[begin:end] for begin, end in pairwise(ends))), group)


def _is_kept(row: SampleRow) -> bool:
    lengths = {None if (array := getattr(row, name)) is None else len(array) for name in ARRAYS}
    if len(lengths) > 1:
        raise ValueError(f"Arrays of sample {row.id} have different lengths, or some are missing.")
    length = lengths.pop()
    return length is not None and length <= MAX_LENGTH and (3 * length <= MAX_ITEMS or 3 * _num_runs(row) <= MAX_ITEMS)


def _num_runs(row: SampleRow) -> int:
    """Count the marks of a row; a list of more than ``MAX_ITEMS`` could not be read."""
    return len(run_ends(*_marked([row])))


def _own_tokens(row: SampleRow, group: Group) -> Array:
    """Return the tokens that are not the group's; all of them if they do not begin with the group's."""
    assert row.tokens is not None
    tokens, shared = row.tokens.astype("<i4", copy=False), group.tokens
    if shared is not None and 0 < len(shared) <= len(tokens) and np.array_equal(tokens[: len(shared)], shared):
        return tokens[len(shared) :]
    return tokens


def _marks(rows: Sequence[SampleRow]) -> list[list[int]]:
    """Return length, version and flags of each run of each row."""
    if not rows:
        return []
    versions, flags = _marked(rows)
    bounds = list(accumulate(len(_tokens(row)) for row in rows))
    ends = np.union1d(run_ends(versions, flags), np.array([one for one in bounds if one], np.int64))
    flat = np.stack((np.diff(ends, prepend=0), versions[ends - 1], flags[ends - 1]), axis=1)
    cuts = [0, *np.searchsorted(ends, bounds, side="right").tolist()]
    return [flat[begin:end].reshape(-1).tolist() for begin, end in pairwise(cuts)]


def _marked(rows: Sequence[SampleRow]) -> tuple[Array, Array]:
    """Return, for each token of all rows, its version, and 1 for generated plus 2 for loss."""
    drawn, loss = (_joined(rows, name, "u1") != 0 for name in ("generated", "loss_mask"))
    return _joined(rows, "versions", "<i4"), drawn + 2 * loss.astype(np.uint8)


def _tokens(row: SampleRow) -> Array:
    assert row.tokens is not None
    return row.tokens


def _joined(rows: Sequence[SampleRow], name: str, dtype: str) -> Array:
    return np.concatenate([np.zeros(0, dtype), *(getattr(row, name) for row in rows)]).astype(dtype, copy=False)


def _length_of(body: Body, group: Group) -> int:
    """Return the length of a sample's arrays; raise ProtocolError if they do not match."""
    if body.num_tokens is None:
        return 0
    shared = 0 if group.tokens is None or not body.shares_tokens else len(group.tokens)
    marks = body.marks or []
    if len(marks) % 3 or not all(type(one) is int for one in marks) or not 0 <= body.num_tokens <= MAX_TOKENS:
        raise ProtocolError(f"{WHAT} has arrays that no row has.")
    lengths, versions, flags = marks[0::3], marks[1::3], marks[2::3]
    sound = all(one >= 0 for one in lengths) and all(-(2**31) <= one < 2**31 for one in versions)
    if not sound or not all(0 <= one <= 3 for one in flags) or sum(lengths) != shared + body.num_tokens:
        raise ProtocolError(f"{WHAT} has arrays of different lengths.")
    return shared + body.num_tokens


def _num_drawn(body: Body) -> int:
    # The marks of a sample without arrays were not checked.
    marks = (body.num_tokens is not None and body.marks) or []
    return sum(length for length, flags in zip(marks[0::3], marks[2::3], strict=True) if flags & 1)


def _unmarked(body: Body) -> tuple[Array, Array, Array]:
    """Return version, generated and loss of each token."""
    marks = body.marks or []
    lengths = np.array(marks[0::3], np.int64)
    versions = np.repeat(np.array(marks[1::3], np.int32), lengths)
    flags = np.repeat(np.array(marks[2::3], np.uint8), lengths)
    return versions, flags & 1, flags >> 1


def _split(values: Array, counts: Sequence[int]) -> list[Array]:
    return np.split(values, list(accumulate(counts))[:-1]) if counts else []
