"""What a source of rows is, and what is said of a row that cannot be used."""

from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.errors import ConfigError

#: Bytes read at once from a file that is gone through.
CHUNK_BYTES = 1 << 22


class BadLine(ConfigError):
    """One row of a dataset cannot be used; names the dataset and the row, counted from 1."""


class Rows(Protocol):
    """Rows by number. Pure: the same number gives the same row at every call, and after every restart."""

    #: Size of what is read, in bytes; 0 where that is not known.
    num_bytes: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Row ``index``, from 0. Blocks for the disk.

        Raises:
            BadLine: it cannot be read.
            ConfigError: none can be.
        """
        ...

    def digest(self) -> str:
        """Of the content: equal digests, equal rows."""
        ...


def digest_of_file(path: Path) -> str:
    """Of a file's bytes. Blocks for the disk. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
