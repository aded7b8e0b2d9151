"""Store the columns that a rank read in a file next to that of its recorded batch, so that a replay reads the same.

    FILE.columns    records, one per value: bytes of what follows (uint32, little endian), its CRC-32, and as msgpack
                    [column, row, value as consumers/batch/columns.py makes it]

Records are appended as columns are read. A torn record at the end (the trainer was killed) is ignored.
"""

import logging
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.consumers.batch.columns import Store
from penstock.errors import PayloadError, ProtocolError
from penstock.records.codec import MAX_RECORD_BYTES, MAX_TEXT_BYTES, pack, unpack
from penstock.system.disk import append, until_room

log = logging.getLogger(__name__)

_PRELUDE = struct.Struct("<II")


def path_of(batch: Path) -> Path:
    """Return the path of the columns of a recorded batch."""
    return batch.with_name(f"{batch.name}.columns")


class RecordedColumns:
    """A store that records values as they are read.

    Args:
        store: the store to write to and read from.
        batch: file of the batch's recording.
    """

    def __init__(self, store: Store, batch: Path) -> None:
        self._store = store
        self._path = path_of(batch)
        self._kept: set[tuple[str, int]] = set()

    def write(self, name: str, values: Mapping[int, bytes]) -> None:
        self._store.write(name, values)

    def tell_lost(self, name: str, rows: Sequence[int]) -> None:
        self._store.tell_lost(name, rows)

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Read from the store and record the values; blocks for the disk too. Raises OSError."""
        values = self._store.read(name, rows, timeout_s)
        new = [row for row in values if (name, row) not in self._kept]
        records = b"".join(_record(name, row, values[row]) for row in new)
        until_room(lambda: append(self._path, records))
        self._kept.update((name, row) for row in new)
        return values


def _record(name: str, row: int, value: bytes) -> bytes:
    if len(value) > MAX_TEXT_BYTES:
        log.warning("column %s of row %d has %d bytes, too many to be recorded", name, row, len(value))
        return b""
    body = pack([name, row, value])
    return _PRELUDE.pack(len(body), zlib.crc32(body)) + body


def load(batch: Path) -> dict[str, dict[int, bytes]]:
    """Return recorded values by column and row; {} without a file. Blocks.

    Raises:
        PayloadError: a record is damaged.
    """
    path = path_of(batch)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    columns: dict[str, dict[int, bytes]] = {}
    at = 0
    while at + _PRELUDE.size <= len(data):
        size, checksum = _PRELUDE.unpack_from(data, at)
        body = data[at + _PRELUDE.size : at + _PRELUDE.size + size]
        at += _PRELUDE.size + size
        if size > MAX_RECORD_BYTES or (len(body) == size and zlib.crc32(body) != checksum):
            raise PayloadError(f"{path} is damaged: record the batch again, or delete the file to go without columns.")
        if len(body) < size:
            break
        name, row, value = _fields(body, path)
        columns.setdefault(name, {})[row] = value
    if at != len(data):
        log.warning("%s is torn at its end; the incomplete record is ignored", path)
    return columns


def _fields(body: bytes, path: Path) -> tuple[str, int, bytes]:
    try:
        name, row, value = unpack(body, f"a record of {path}")
    except (ProtocolError, TypeError, ValueError) as exc:
        raise PayloadError(f"{path} holds something that is not a column: {exc}.") from exc
    if not isinstance(name, str) or not isinstance(row, int) or not isinstance(value, bytes):
        raise PayloadError(f"{path} holds something that is not a column.")
    return name, row, value
