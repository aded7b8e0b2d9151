"""Read lines of JSON, also compressed by gzip; one scan of the bytes finds the ends of the lines.

A line is decoded when it is read. A compressed file is decompressed once into an unnamed temporary file, since gzip has
no random access.
"""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import xxhash

from penstock.errors import ConfigError
from penstock.producer.sources.rows import CHUNK_BYTES, BadLine
from penstock.records.codec import MAX_TEXT_BYTES

#: Most bytes of a line, twice the longest text of a record.
MAX_LINE_BYTES = 2 * MAX_TEXT_BYTES
#: Optional first bytes of a file.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")

Offsets: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class JsonLines:
    """Rows of a file with one JSON object per line; see :class:`~penstock.producer.sources.rows.Rows`.

    Blank lines at the end are ignored. The index takes 8 bytes of memory per line.

    Args:
        dataset: name of the dataset, for errors.

    Raises:
        ConfigError: the file cannot be read to its end.
    """

    def __init__(self, path: Path, dataset: str) -> None:
        self._path, self._dataset = path, dataset
        self._file: IO[bytes] = self._decompress() if path.suffix == ".gz" else self._open()
        self._stamp = _stamp(self._file)
        #: Offset after each line, without the blank lines at the end of the file.
        self._ends, self.num_bytes, self._digest = self._scan()

    def __len__(self) -> int:
        return len(self._ends)

    def digest(self) -> str:
        return self._digest

    def row(self, index: int) -> dict[str, Any]:
        where = f"dataset {self._dataset}: line {index + 1} of {self._path}"
        start, end = self._span(index)
        if end - start > MAX_LINE_BYTES:
            raise BadLine(f"{where} has more than {MAX_LINE_BYTES >> 20} MiB; split or remove it.")
        line = self._line(index)
        if not line.strip():
            raise BadLine(f"{where} is blank; remove it.")
        return decode_line(line, where)

    def _line(self, index: int) -> bytes:
        start, end = self._span(index)
        line = os.pread(self._file.fileno(), end - start, start)
        if _stamp(self._file) != self._stamp:
            raise ConfigError(
                f"dataset {self._dataset}: {self._path} changed while being read: restore it and restart the producer."
            )
        return line if index else line.removeprefix(BYTE_ORDER_MARK)

    def _span(self, index: int) -> tuple[int, int]:
        """Return the offsets of the line's beginning and end."""
        return (int(self._ends[index - 1]) if index else 0), int(self._ends[index])

    def _scan(self) -> tuple[Offsets, int, str]:
        """Return the end of each line up to the last nonblank one, the number of bytes, and their digest."""
        found: list[Offsets] = [np.zeros(0, np.int64)]
        digest, read, used = xxhash.xxh3_128(), 0, 0
        self._file.seek(0)
        last = b"\n"
        while chunk := self._read(found):
            digest.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
            found.append(np.add(ends, read + 1, dtype=np.int64))
            used = read + len(chunk.rstrip()) if _is_nonblank(chunk, read) else used
            read += len(chunk)
            last = chunk[-1:]
        if last != b"\n":
            found.append(np.array([read], np.int64))
        ends = np.concatenate(found)
        lines = int(np.searchsorted(ends, used)) + 1 if used else 0
        return ends[:lines].copy(), read, digest.hexdigest()

    def _read(self, found: list[Offsets]) -> bytes:
        try:
            return self._file.read(CHUNK_BYTES)
        except OSError as exc:
            raise self._unreadable(sum(map(len, found)), exc) from exc

    def _open(self) -> BufferedReader:
        try:
            return self._path.open("rb")
        except OSError as exc:
            raise self._unreadable(0, exc) from exc

    def _decompress(self) -> IO[bytes]:
        """Decompress the file into a temporary one."""
        try:
            # Unnamed: deleted with this object, or when the process ends.
            unpacked = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115
            for chunk in self._decompressed_chunks():
                unpacked.write(chunk)
            unpacked.flush()
        except OSError as exc:
            raise ConfigError(
                f"dataset {self._dataset}: decompressing {self._path} into {tempfile.gettempdir()} failed ({exc}): "
                "free disk space there, or set TMPDIR to another folder."
            ) from exc
        return unpacked

    def _decompressed_chunks(self) -> Iterator[bytes]:
        lines = 0
        try:
            with gzip.open(self._path, "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    lines += chunk.count(b"\n")
                    yield chunk
        except (OSError, EOFError, zlib.error) as exc:
            raise self._unreadable(lines, exc) from exc

    def _unreadable(self, lines: int, exc: Exception) -> ConfigError:
        return ConfigError(
            f"dataset {self._dataset}: {self._path} cannot be read after line {lines} ({exc}): correct or replace it."
        )


def _is_nonblank(chunk: bytes, begin: int) -> bool:
    """Return whether a chunk contains more than whitespace and a byte order mark."""
    return not (chunk if begin else chunk.removeprefix(BYTE_ORDER_MARK)).isspace() and chunk != BYTE_ORDER_MARK


def _stamp(file: IO[bytes]) -> tuple[int, int]:
    """Return (size, mtime), which change if the file does."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def decode_line(line: bytes, where: str) -> dict[str, Any]:
    """Decode a line that is a JSON object. Raises BadLine, whose text begins with ``where``."""
    try:
        row = json.loads(line.decode())
    except RecursionError as exc:
        raise BadLine(f"{where} is nested too deeply; simplify it.") from exc
    except ValueError as exc:
        raise BadLine(f"{where} is not JSON in UTF-8 ({exc}); correct it.") from exc
    if not isinstance(row, dict):
        raise BadLine(f"{where} is not a JSON object; correct it.")
    return row
