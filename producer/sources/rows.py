"""The protocol of sources of rows, and the error of an unusable row."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.errors import ConfigError


class RowSource(Protocol):
    """Rows of a dataset by number: ``path: python:module:Class``, made with the dataset's ``source_args``.

    It must be pure: ``row(index)`` returns the same row at every call, in every process, and after every restart, since
    a position identifies the next prompt by its number alone. Called by the producer, which blocks for the result; its
    exceptions end the producer.
    """

    def __len__(self) -> int:
        """Return the number of rows, which is constant during a run."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0: columns by their names, of JSON values."""
        ...


#: Bytes per read of a file that is scanned.
CHUNK_BYTES = 1 << 22


class BadLine(ConfigError):
    """One row of a dataset is unusable; names the dataset and the row, counted from 1."""


class Rows(Protocol):
    """Rows by number. Pure: the same number gives the same row at every call, and after every restart."""

    #: Bytes of the source; 0 if not known.
    num_bytes: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0. Blocks for the disk.

        Raises:
            BadLine: it cannot be read.
            ConfigError: no row can be read.
        """
        ...

    def digest(self) -> str:
        """Return the digest of the content: equal digests, equal rows."""
        ...


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes. Blocks for the disk. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
