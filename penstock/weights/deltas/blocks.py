"""Encode a piece of a tensor as its lossless difference to an earlier version. Knows no torch.

| kind   | content, deflated                                                                          |
|--------|--------------------------------------------------------------------------------------------|
| same   | nothing: no element changed                                                                |
| sparse | the distance of each changed element from the previous one, a byte (255: see the next      |
|        | list); the longer distances, 4 bytes each; the differences                                 |
| dense  | the difference of every element                                                            |
| raw    | the new bytes as they are, not deflated                                                    |

A difference is that of the bit patterns as unsigned integers of the element's size, modulo their range, zigzag (0, -1,
1, -2 ...), least significant bytes of all elements first: one step of a float up or down is 1 or 2, whatever its size.
"""

import zlib
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PublishError

Kind = Literal["same", "sparse", "dense", "raw"]
Array: TypeAlias = NDArray[Any]
KINDS: tuple[Kind, ...] = ("same", "sparse", "dense", "raw")
#: Bytes of a piece, a few of which are in memory at once. A multiple of every element's size.
PIECE_BYTES = 16 * 1024 * 1024
#: Compression level of zlib; higher ones take four times as long and save 5 %.
LEVEL = 1
_FAR = 255
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Block(NamedTuple):
    """Hold the change of one piece."""

    kind: Kind
    #: Changed elements, and how many of their distances take four bytes; 0 unless ``sparse``.
    num_changed: int
    num_far: int
    data: bytes


def encode(before: "bytes | None", after: bytes, item_bytes: int) -> Block:
    """Encode the change from ``before`` to ``after``, pieces of the same size; ``before`` None: no base.

    Args:
        item_bytes: bytes of an element: 1, 2, 4 or 8.
    """
    if before is None:
        return Block("raw", 0, 0, after)
    old, new = (np.frombuffer(piece, _WORDS[item_bytes]) for piece in (before, after))
    at = np.flatnonzero(old != new)
    if not at.size:
        return Block("same", 0, 0, b"")
    distances = np.diff(at, prepend=-1)
    far = distances[distances >= _FAR].astype("<u4")
    if at.size * (1 + item_bytes) + far.nbytes < len(after) // 2:
        near = np.minimum(distances, _FAR).astype(np.uint8)
        parts = near.tobytes() + far.tobytes() + _planes(new[at] - old[at])
        return Block("sparse", int(at.size), int(far.size), zlib.compress(parts, LEVEL))
    data = zlib.compress(_planes(new - old), LEVEL)
    return Block("dense", 0, 0, data) if len(data) < len(after) else Block("raw", 0, 0, after)


def decode(block: Block, before: "bytes | None", num_bytes: int, item_bytes: int) -> bytes:
    """Return the new piece of ``num_bytes``. Raises PublishError on an invalid block."""
    if block.kind == "raw":
        _demand(len(block.data) == num_bytes, "a raw piece of another size")
        return block.data
    if before is None or len(before) != num_bytes:
        raise PublishError("A delta changes a piece that its base does not have: load a whole version.")
    if block.kind == "same":
        return before
    old: Array = np.frombuffer(before, _WORDS[item_bytes])
    if block.kind == "dense":
        return (old + _differences(_inflated(block.data, num_bytes), item_bytes)).tobytes()
    count, num_far = block.num_changed, block.num_far
    _demand(0 < count <= old.size and 0 <= num_far <= count, "more changes than elements")
    data = _inflated(block.data, count * (1 + item_bytes) + 4 * num_far)
    at = _places(data, count, num_far, old.size)
    new = old.copy()
    new[at] += _differences(data[count + 4 * num_far :], item_bytes)
    return new.tobytes()


def _places(data: bytes, count: int, num_far: int, size: int) -> Array:
    """Return [count] the indices of changed elements, ascending."""
    distances = np.frombuffer(data, np.uint8, count).astype(np.int64)
    is_far = distances == _FAR
    _demand(int(is_far.sum()) == num_far, "another number of long distances")
    distances[is_far] = np.frombuffer(data, "<u4", num_far, offset=count)
    # A distance is below 2^32 and there are at most PIECE_BYTES of them: the sum fits.
    _demand(bool(distances.min() > 0), "two changes of one element")
    at: Array = np.cumsum(distances) - 1
    _demand(int(at[-1]) < size, "a change behind its end")
    return at


def _planes(difference: Array) -> bytes:
    """Zigzag-encode, then split into byte planes."""
    bits = difference.dtype.itemsize * 8
    one = difference.dtype.type(1)
    sign = difference >> difference.dtype.type(bits - 1)
    zigzag = (difference << one) ^ (np.zeros_like(sign) - sign)
    little = zigzag.astype(zigzag.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little.view(np.uint8).reshape(-1, bits // 8).T).tobytes()


def _differences(planes: bytes, item_bytes: int) -> Array:
    rows = np.frombuffer(planes, np.uint8).reshape(item_bytes, -1)
    word = np.dtype(_WORDS[item_bytes])
    zigzag: Array = np.ascontiguousarray(rows.T).reshape(-1).view(word.newbyteorder("<")).astype(word, copy=False)
    one = word.type(1)
    found: Array = (zigzag >> one) ^ (np.zeros_like(zigzag) - (zigzag & one))
    return found


def _inflated(data: bytes, num_bytes: int) -> bytes:
    """Inflate to exactly ``num_bytes``; never allocate more."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, num_bytes + 1)
    except zlib.error as exc:
        raise _foreign(f"a piece that cannot be inflated, {exc}") from exc
    _demand(len(found) == num_bytes and stream.eof and not stream.unused_data, "a piece of another size")
    return found


def _demand(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise _foreign(otherwise)


def _foreign(what: str) -> PublishError:
    return PublishError(f"A delta holds what no delta can ({what}): it is not whole, load a whole version.")
