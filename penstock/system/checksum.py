"""Checksums of files, for publications, workers and checkpoints."""

import zlib
from pathlib import Path

import xxhash

from penstock.system.disk import open_plain

_CHUNK_BYTES = 16 * 1024 * 1024


def file_crc32(path: Path) -> int:
    """Compute the CRC-32 of a plain file's bytes. Blocks. Raises OSError, also for other kinds of files."""
    value = 0
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def file_xxh3(path: Path) -> int:
    """Compute the XXH3-64 of a file: for gigabytes of weights, of which CRC-32 takes a second each. Blocks.

    Raises OSError, also if it is not a plain file.
    """
    hasher = xxhash.xxh3_64()
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.intdigest()


def bytes_xxh3(data: "bytes | memoryview") -> int:
    """Compute the XXH3-64 of bytes."""
    return xxhash.xxh3_64_intdigest(data)
