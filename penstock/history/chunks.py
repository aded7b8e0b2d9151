"""Blocks stored back to back in chunks of one page each: stored one by one they would leave half of each page empty."""

import sqlite3

from penstock.errors import ProtocolError

#: Bytes of a chunk: a page of ``part.PAGE_BYTES`` fits one, as a row.
CHUNK_BYTES = 16_344


class ChunkWriter:
    """Appends to the chunks of a file, within its commits."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        #: Bytes written; content of the last chunk; bytes that the next ``flush`` writes.
        self._end = 0
        self._tail = b""
        self._pending: list[bytes] = []

    def append(self, data: bytes) -> int:
        """Append ``data``; return the position where it begins."""
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
        """Continue after the last commit."""
        found = self._connection.execute("SELECT n, data FROM chunks ORDER BY n DESC LIMIT 1").fetchone()
        number, data = found or (0, b"")
        self._pending, self._end = [], number * CHUNK_BYTES + len(data)
        self._tail = data if len(data) < CHUNK_BYTES else b""


def read_chunks(connection: sqlite3.Connection, begin: int, length: int) -> bytes:
    """Return bytes that were appended. Raises ProtocolError if they are missing, or sqlite3.Error."""
    first, last = begin // CHUNK_BYTES, (begin + max(length, 1) - 1) // CHUNK_BYTES
    rows = connection.execute("SELECT n, data FROM chunks WHERE n BETWEEN ? AND ? ORDER BY n", (first, last)).fetchall()
    if [number for number, _ in rows] != list(range(first, last + 1)) or not all(type(one) is bytes for _, one in rows):
        raise ProtocolError("the bytes of its block are missing.")
    data = b"".join(one for _, one in rows)[begin - first * CHUNK_BYTES :][:length]
    if len(data) != length:
        raise ProtocolError("some bytes of its block are missing.")
    return data
