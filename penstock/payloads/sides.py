"""Large arrays of a sample (routed experts, images), each in its own key, read only on request.

    offset 0   magic ``PSS1``
    offset 4   H, length of the header: uint32, little endian
    offset 8   msgpack list [dtype, shape]; then, at the next multiple of 8, the array, C order, little endian

They are written, made permanent and freed with the sample's payload, on the same server. Arrays shared by all samples
of a group (its images) exist once for each lease and server, under the name of sample 0 of that lease, committed or
not, and are freed with the last of them. Nothing here blocks.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, PayloadError
from penstock.names import IMAGE_GRID, PIXEL_VALUES, ROUTED_EXPERTS, STEP_REWARDS, check_name
from penstock.payloads.format import Payload
from penstock.records.keys import Keys

MAGIC = b"PSS1"
#: Most side arrays of one sample, and most bytes of one (a Redis string holds 512 MiB).
MAX_SIDES, MAX_BYTES = 16, 256 * 1024 * 1024
MAX_DIMENSIONS = 8
MAX_HEADER_BYTES = 1024

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")

#: Side arrays of a sample that have no meaning for one part of it.
_UNDIVIDED = (PIXEL_VALUES, IMAGE_GRID, STEP_REWARDS)

_PRELUDE = struct.Struct("<4sI")

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes of a side array that a group shares."""

    data: bytes
    #: CRC-32
    checksum: int

    def entry(self, name: str) -> list[Any]:
        """Return its entry in a sample's record."""
        return [name, len(self.data), self.checksum, SHARED]


#: Last value of a shared array's entry of ``sides`` in a record: the sample of the job that names its key.
SHARED = 0


def key_of(keys: Keys, job: str, k: int, token: str, side: Sequence[Any]) -> str:
    """Return the key of a side array, by its entry in a sample's record."""
    return keys.side(f"{job}/{side[3] if len(side) > 3 else k}", token, side[0])


def packed(name: str, array: Any, sample_id: str) -> Packed:
    """Pack a side array that a group shares. Raises PayloadError if it cannot be stored."""
    data = pack(name, array, sample_id)
    return Packed(data, zlib.crc32(data))


def pack_all(sides: Mapping[str, Any], sample_id: str, wanted: Sequence[str] = ()) -> dict[str, bytes]:
    """Pack a sample's side arrays; return their bytes by name.

    Args:
        wanted: names that every sample of the run must have.

    Raises:
        PayloadError: a wanted one is missing (T17), or one cannot be stored.
    """
    if missing := [name for name in wanted if sides.get(name) is None]:
        raise PayloadError(
            f"sample {sample_id}: rollout.sides asks for {', '.join(missing)}, and the sample has none: let the "
            "engine, environment or reward set sample.sides, or do not ask for it."
        )
    if len(sides) > MAX_SIDES:
        raise PayloadError(f"sample {sample_id}: {len(sides)} side arrays are more than the {MAX_SIDES} allowed.")
    return {name: pack(name, array, sample_id) for name, array in sides.items() if array is not None}


def pack(name: str, array: Any, sample_id: str) -> bytes:
    """Pack one side array. Raises PayloadError if it cannot be stored."""
    what = f"sample {sample_id}: side array {name!r}"
    try:
        check_name("side array", name)
    except ConfigError as exc:
        raise PayloadError(f"{what}: {exc}") from exc
    value = np.asarray(array)
    if value.dtype.name not in DTYPES:
        raise PayloadError(f"{what} is of {value.dtype}; convert it to one of {', '.join(DTYPES)}.")
    if value.nbytes > MAX_BYTES or value.ndim > MAX_DIMENSIONS:
        raise PayloadError(f"{what} has {value.nbytes} bytes in {value.ndim} dimensions; at most {MAX_BYTES} in 8.")
    value = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
    header = msgpack.packb([value.dtype.name, list(value.shape)])
    return b"".join(
        (_PRELUDE.pack(MAGIC, len(header)), header, bytes(-(len(header) + _PRELUDE.size) % 8), value.tobytes())
    )


def unpack(name: str, data: bytes, sample_id: str, checksum: int) -> Array:
    """Return the array, a read-only view into ``data``. Raises PayloadError for bytes not written by ``pack``."""
    what = f"sample {sample_id}: side array {name!r}"
    if zlib.crc32(data) != checksum:
        raise PayloadError(f"{what} is not the one that was committed (CRC-32 differs).")
    if len(data) < _PRELUDE.size:
        raise PayloadError(f"{what} has {len(data)} bytes, too few for any.")
    magic, size = _PRELUDE.unpack_from(data)
    start = _PRELUDE.size + size
    if magic != MAGIC or size > MAX_HEADER_BYTES or start > len(data):
        raise PayloadError(f"{what} does not begin as one that penstock wrote.")
    try:
        dtype_name, shape = msgpack.unpackb(data[_PRELUDE.size : start], max_ext_len=0)
        if dtype_name not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"dtype {dtype_name!r}, shape {shape!r}")
        if not all(type(length) is int and 0 <= length <= MAX_BYTES for length in shape):
            raise ValueError(f"shape {shape!r}")
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise PayloadError(f"{what} has a header that cannot be read: {exc}.") from exc
    dtype = np.dtype(dtype_name).newbyteorder("<")
    start += -start % 8
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise PayloadError(f"{what} has {len(data) - start} bytes where its shape {shape} needs another number.")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def cut(name: str, array: Array, whole: Payload, begin: int, end: int, sample_id: str) -> Array:
    """Return what a side array of a sample of several parts has for tokens ``begin`` to ``end``, one part.

    Arrays with an entry for each token, or each after the prompt, are cut; others are those of every part.

    Args:
        whole: payload of the sample.

    Raises:
        PayloadError: images, or rewards of steps, which cannot be divided.
    """
    if name in _UNDIVIDED:
        raise PayloadError(
            f"sample {sample_id} has several parts, and its side array {name!r} cannot be divided among them: have its "
            "agent keep one history, or leave the array out."
        )
    entries, length, prompt = len(array) if array.ndim else 0, len(whole), whole.prompt_length
    if name == ROUTED_EXPERTS:
        return array[begin : end - 1]
    if entries not in (length, length - prompt):
        return array
    missing = length - entries
    return array[max(0, begin - missing) : end - missing]
