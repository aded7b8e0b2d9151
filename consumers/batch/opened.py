"""Open the payloads of one rank's rows: views into their bytes, and side arrays stored separately."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from penstock import payloads
from penstock.errors import PayloadError
from penstock.payloads import Payload, sides
from penstock.protocol.records.manifest import Row
from penstock.system.collecting import collecting_later

Bytes = bytes | memoryview
#: Bytes by sample id, or a callable that returns them for a row; None where a payload was lost after the cut.
Payloads = Mapping[str, Bytes | None] | Callable[[Row], Bytes | None]
#: Reads side arrays of rows by name: bytes by sample id, None if one is gone; rows without it are left out.
ReadSides = Callable[[Sequence[Row], str], Mapping[str, bytes | None]]


class OpenedPayloads:
    """Payloads of one rank's rows of batch ``n``; read at their first use."""

    def __init__(self, n: int, rows: Sequence[Row], data: Payloads, read_sides: ReadSides | None) -> None:
        self._n = n
        self._rows = rows
        self._data = data
        self._read_sides = read_sides

    @cached_property
    def all(self) -> list[Payload | None]:
        """Return views into the payload of each row, None if it is lost; decoded once. Raises PayloadError."""
        with collecting_later():
            return [self._open(row) for row in self._rows]

    def side(self, name: str) -> list[NDArray[Any] | None]:
        """Return side array ``name`` of each row, None for a row without it; see ``Batch.side``."""
        inside = [None if payload is None else payload.sides.get(name) for payload in self.all]
        if not any(side[0] == name for row in self._rows for side in row.sides):
            return inside
        if self._read_sides is None:
            raise PayloadError(f"batch {self._n} was made without a way to read side arrays.")
        alive = [row for row, payload in zip(self._rows, self.all, strict=True) if payload is not None]
        found = self._read_sides(alive, name)
        return [
            array if array is not None else _unpacked(row, name, found)
            for row, array in zip(self._rows, inside, strict=True)
        ]

    def _open(self, row: Row) -> Payload | None:
        if row.lost:
            return None
        try:
            data = self._data(row) if callable(self._data) else self._data[row.sample]
        except KeyError as exc:
            raise PayloadError(f"sample {row.sample}: batch {self._n} was made without its payload; fetch it.") from exc
        return None if data is None else payloads.decode(data, row.sample, row.checksum)


def _unpacked(row: Row, name: str, found: Mapping[str, bytes | None]) -> NDArray[Any] | None:
    if row.sample not in found:
        return None
    data = found[row.sample]
    if data is None:
        raise PayloadError(f"sample {row.sample}: its side array {name!r} is gone from its payload server.")
    return sides.unpack(name, data, row.sample, next(side[2] for side in row.sides if side[0] == name))
