"""Split a column's array into one value per row, and join values in the reader's own layout.

    offset 0    magic ``PSC1``
    offset 4    kind (0: the writer had lost the payload, 1: per token, 2: per sample), dtype; one byte each, then two
    offset 8    numbers per token: uint32, little endian; CRC-32 of what follows, begun with the row's index: uint32
    offset 16   [length], [length, width] or [1] numbers, little endian

Nothing here blocks or reads Redis.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PayloadError, ProtocolError
from penstock.protocol.records.manifest import Row

Array = NDArray[Any]

#: Most bytes of the value of one row.
MAX_VALUE_BYTES = 256 * 1024 * 1024
#: Most numbers per token.
MAX_WIDTH = 65536

_HEADER = struct.Struct("<4sBBxxII")
_MAGIC = b"PSC1"
_DTYPES = [np.dtype(name).newbyteorder("<") for name in ("float16", "float32", "float64", "int8", "uint8", "int16",
                                                         "uint16", "int32", "int64")]  # fmt: skip
_LOST, _TOKEN, _SAMPLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of an array's rows: a rank's complete share, or one micro-batch of it."""

    #: Index into ``all_rows`` of each row; -1 for a filler.
    rows: list[int]
    #: [B] tokens of each row in this layout; 1 if its payload is lost.
    lengths: list[int]
    #: True if rows are concatenated ([T]), False if they are padded ([B, L]).
    packed: bool = False

    @classmethod
    def of_micro(cls, micro: Mapping[str, Any]) -> "Layout":
        """Return the layout of a dict of ``Batch.packed`` or ``Batch.micro_batches``."""
        if not {"rows", "lengths"} <= micro.keys():
            raise ProtocolError("micro is a micro-batch, a dict with rows and lengths, as Batch.packed() yields it.")
        return cls(micro["rows"].tolist(), micro["lengths"].tolist(), "cu_seqlens" in micro)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the leading dimensions of a per-token array."""
        return (sum(self.lengths),) if self.packed else (len(self.lengths), max(self.lengths))


def split(array: Any, layout: Layout, lost: frozenset[int], batch: str, name: str) -> dict[int, bytes]:
    """Return values by row index of an array (numpy or torch) of ``layout``, without fillers.

    ``lost``: rows whose payload this rank does not have, and which therefore have no value.

    Raises:
        ProtocolError: its shape is neither per token nor per sample, or its dtype cannot be stored.
    """
    values = _to_numpy(array)
    dtype = values.dtype.newbyteorder("<")
    if values.dtype == np.bool_:
        values, dtype = values.view(np.uint8), np.dtype(np.uint8)
    if dtype not in _DTYPES:
        raise ProtocolError(
            f"column {name!r} is {values.dtype}, which cannot be stored: convert it to one of "
            f"{', '.join(one.name for one in _DTYPES)}."
        )
    lead = layout.shape
    per_token = values.shape[: len(lead)] == lead and values.ndim <= len(lead) + 1
    if not per_token and values.shape != (len(layout.lengths),):
        raise ProtocolError(
            f"column {name!r} has shape {values.shape}; {batch} wants {list(lead)} or {[*lead, 'width']} per token, or "
            f"{[len(layout.lengths)]} per sample."
        )
    out: dict[int, bytes] = {}
    start = 0
    for i, (row, length) in enumerate(zip(layout.rows, layout.lengths, strict=True)):
        if row in lost:
            out[row] = _encode(np.zeros(0, np.float32), _LOST, row, name)
        elif row >= 0:
            of = values[i : i + 1] if not per_token else values[start : start + length] if layout.packed else (
                values[i, :length])  # fmt: skip
            out[row] = _encode(of.astype(dtype, copy=False), _TOKEN if per_token else _SAMPLE, row, name)
        start += length
    return out


def join(values: Mapping[int, bytes], layout: Layout, rows: Sequence[Row], lost: frozenset[int], name: str) -> Array:
    """Return the array of ``layout`` from values by row index; 0 on padding, fillers and lost payloads.

    Raises:
        PayloadError: a value is damaged, of another length than its sample, or of another kind than the others.
    """
    decoded = {row: _decode(data, rows[row], row, name) for row, data in values.items()}
    kinds = {(kind, of.dtype, of.shape[1:]) for kind, of in decoded.values() if kind != _LOST}
    if len(kinds) > 1:
        raise PayloadError(f"column {name!r} was put per token and per sample, or with several dtypes or widths.")
    kind, dtype, width = kinds.pop() if kinds else (_SAMPLE, np.dtype(np.float32), ())
    if kind == _SAMPLE:
        out: Array = np.zeros(len(layout.rows), dtype)
        for i, row in enumerate(layout.rows):
            if row >= 0 and decoded[row][0] != _LOST:
                out[i] = decoded[row][1][0]
        return out
    out = np.zeros((*layout.shape, *width), dtype)
    start = 0
    for i, (row, length) in enumerate(zip(layout.rows, layout.lengths, strict=True)):
        if row >= 0 and row not in lost and decoded[row][0] != _LOST:
            target = out[start : start + length] if layout.packed else out[i, :length]
            target[...] = decoded[row][1]
        start += length
    return out


def hollow(values: Mapping[int, bytes]) -> set[int]:
    """Return rows whose payload the writer had lost. The values were checked by ``join``."""
    return {row for row, data in values.items() if data[len(_MAGIC)] == _LOST}


def _encode(values: Array, kind: int, row: int, name: str) -> bytes:
    width = values.shape[1] if values.ndim > 1 else 0
    body = np.ascontiguousarray(values).tobytes()
    if width > MAX_WIDTH or len(body) > MAX_VALUE_BYTES:
        raise ProtocolError(
            f"column {name!r} has {width} numbers per token and {len(body)} bytes for one sample; at most {MAX_WIDTH} "
            f"and {MAX_VALUE_BYTES} are stored."
        )
    code = _DTYPES.index(values.dtype.newbyteorder("<"))
    return _HEADER.pack(_MAGIC, kind, code, width, _checksum(body, row)) + body


def _decode(data: bytes, row: Row, index: int, name: str) -> tuple[int, Array]:
    """Return (kind, [length] or [length, width] or [1]) of one value, checked."""
    what = f"column {name!r} of sample {row.sample}"
    if not _HEADER.size <= len(data) <= _HEADER.size + MAX_VALUE_BYTES:
        raise PayloadError(f"{what} has {len(data)} bytes, which is not the size of a value.")
    magic, kind, code, width, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if magic != _MAGIC or kind > _SAMPLE or code >= len(_DTYPES) or width > MAX_WIDTH:
        raise PayloadError(f"{what} is not a value that penstock wrote.")
    if _checksum(body, index) != checksum:
        raise PayloadError(f"{what} was damaged: its checksum is another one.")
    count = {_LOST: 0, _TOKEN: row.length * max(width, 1), _SAMPLE: 1}[kind]
    if len(body) != count * _DTYPES[code].itemsize:
        raise PayloadError(f"{what} has {len(body)} bytes where a sample of {row.length} tokens needs {count} numbers.")
    values: Array = np.frombuffer(body, _DTYPES[code])
    return kind, values.reshape(-1, width) if width else values


def _checksum(body: "bytes | memoryview", row: int) -> int:
    return zlib.crc32(body, row)


def _to_numpy(array: Any) -> Array:
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # a torch tensor, without importing torch
        tensor = array.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        converted: Array = tensor.numpy()
        return converted
    return np.asarray(array)
