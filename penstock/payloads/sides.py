"""Large arrays of a sample (routed experts, images), each in its own key, read only on request.

    offset 0   magic ``PSS2``, index of the dtype in ``DTYPES`` and number of dimensions D: uint8
    offset 8   shape: D x uint64; then the array in C order. All little endian

They are written, made permanent and freed with the sample's payload, on the same server. Arrays shared by all samples
of a group (its images) exist once for each lease and server, under the name of sample 0 of that lease, committed or
not, and are freed with the last of them. Nothing here blocks.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError, PayloadError
from penstock.names import IMAGE_GRID, PIXEL_VALUES, ROUTED_EXPERTS, STEP_REWARDS, check_name
from penstock.payloads.format import Array, Payload, checksum_of
from penstock.records.keys import Keys

MAGIC = b"PSS2"
#: Most side arrays of one sample, and most bytes of one (a Redis string holds 512 MiB).
MAX_SIDES, MAX_BYTES = 16, 256 * 1024 * 1024
MAX_DIMENSIONS = 8

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")

#: Side arrays of a sample that have no meaning for one part of it.
_UNDIVIDED = (PIXEL_VALUES, IMAGE_GRID, STEP_REWARDS)

_PRELUDE = struct.Struct("<4sBB2x")


@dataclass(frozen=True, slots=True)
class Packed:
    """Bytes of a side array that a group shares."""

    data: bytes
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
    return Packed(data, checksum_of(data))


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
    prelude = _PRELUDE.pack(MAGIC, DTYPES.index(value.dtype.name), value.ndim)
    return b"".join((prelude, np.array(value.shape, "<u8").tobytes(), value.tobytes()))


def unpack(name: str, data: bytes, sample_id: str, checksum: int) -> Array:
    """Return the array, a read-only view into ``data``. Raises PayloadError for bytes not written by ``pack``."""
    what = f"sample {sample_id}: side array {name!r}"
    if checksum_of(data) != checksum:
        raise PayloadError(f"{what} is not the one that was committed (its checksum differs).")
    if len(data) < _PRELUDE.size:
        raise PayloadError(f"{what} has {len(data)} bytes, too few for any.")
    magic, code, num_dimensions = _PRELUDE.unpack_from(data)
    start = _PRELUDE.size + 8 * num_dimensions
    if magic != MAGIC or code >= len(DTYPES) or num_dimensions > MAX_DIMENSIONS or start > len(data):
        raise PayloadError(f"{what} does not begin as one that penstock wrote.")
    shape = np.frombuffer(data, "<u8", num_dimensions, _PRELUDE.size).tolist()
    try:
        return np.frombuffer(data, np.dtype(DTYPES[code]).newbyteorder("<"), offset=start).reshape(shape)
    except ValueError as exc:
        raise PayloadError(f"{what} has {len(data) - start} bytes that do not fit its shape {shape}.") from exc


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
