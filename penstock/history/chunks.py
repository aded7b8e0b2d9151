"""Blocks behind one another in chunks that fill a page each: of a value by itself half a page would stay unused."""

import sqlite3

from penstock.errors import ProtocolError

#: Bytes of a chunk: what a page of ``part.PAGE_BYTES`` has room for, as one row.
CHUNK_BYTES = 16_344


class ChunkWriter:
    """Appends to the chunks of a file, within its commits."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        #: Bytes that are there; the last chunk as far as it is filled; bytes that the next ``flush`` writes.
        self._end = 0
        self._tail = b""
        self._pending: list[bytes] = []

    def append(self, data: bytes) -> int:
        """The place where ``data`` begins."""
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
        """Go on behind what is committed."""
        found = self._connection.execute("SELECT n, data FROM chunks ORDER BY n DESC LIMIT 1").fetchone()
        number, data = found or (0, b"")
        self._pending, self._end = [], number * CHUNK_BYTES + len(data)
        self._tail = data if len(data) < CHUNK_BYTES else b""


def read_chunks(connection: sqlite3.Connection, begin: int, length: int) -> bytes:
    """Bytes that were appended. Raises ProtocolError where they are not there; sqlite3.Error."""
    first, last = begin // CHUNK_BYTES, (begin + max(length, 1) - 1) // CHUNK_BYTES
    rows = connection.execute("SELECT n, data FROM chunks WHERE n BETWEEN ? AND ? ORDER BY n", (first, last)).fetchall()
    if [number for number, _ in rows] != list(range(first, last + 1)) or not all(type(one) is bytes for _, one in rows):
        raise ProtocolError("the bytes of its block are not there.")
    data = b"".join(one for _, one in rows)[begin - first * CHUNK_BYTES :][:length]
    if len(data) != length:
        raise ProtocolError("the bytes of its block are not all there.")
    return data
