"""Lossless compression of log-probabilities.

An engine computes in float32 the logarithm of a float32 probability. Near 1 few such probabilities exist, all equal to
1 - k / 2^24 for an integer k: if the logarithm is that of such a probability, or one of its two neighbours in float32,
only k is kept.

    class     a byte each: 0 for 0, 1 for -0; 2 to 191 the exponent of a number that is kept as it is; then, for each of
              three neighbours (the next smaller magnitude, itself, the next greater), the number of bits of k, less 1
    bits      back to back, the lowest first: the 23 of a mantissa, or those of k but for the highest

    packed    a byte 0, then length of the squeezed classes (four bytes, little endian), these, and the bits; or a byte
              1 and planes, if a value has another form (above 0, below -2^65, subnormal, NaN)
"""

import struct
from typing import Any

import numpy as np

from penstock.history.packing import foreign, pack_planes, squeeze, unpack_planes, unsqueeze
from penstock.payloads.format import MAX_TOKENS, Array

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
    """Pack float32 [L]."""
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
