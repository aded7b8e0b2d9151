"""Define the interface of row sources, and the error of an unusable row."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.errors import ConfigError


class RowSource(Protocol):
    """Rows of a dataset by number: ``path: python:module:Class``, created with the dataset's ``source_args``.

    It must be pure: ``row(index)`` returns the same row at every call, in every process and after every restart, since
    positions identify prompts by number alone. The producer blocks for each call, and exceptions end it.
    """

    def __len__(self) -> int:
        """Return the number of rows, which is constant during a run."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0: column name -> JSON value."""
        ...


#: Bytes per read of a file that is scanned.
CHUNK_BYTES = 1 << 22


class BadLine(ConfigError):
    """Unusable row of a dataset; the text names the dataset and the row, counted from 1."""


class Rows(Protocol):
    """Rows by number. Pure: a number returns the same row at every call and after every restart."""

    #: Size of the source in bytes; 0 if unknown.
    num_bytes: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0. Blocks for the disk.

        Raises:
            BadLine: the row is invalid.
            ConfigError: the source cannot be read.
        """
        ...

    def digest(self) -> str:
        """Return the digest of the content; sources with equal digests have equal rows."""
        ...


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes. Blocks for the disk. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
