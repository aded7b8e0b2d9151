"""Checksums of files: what a publication announces, a worker verifies and a checkpoint is named by."""

import zlib
from pathlib import Path

import xxhash

from penstock.system.disk import open_plain

_CHUNK_BYTES = 16 * 1024 * 1024


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes. Blocks while it reads them. Raises OSError, also on what is no plain file."""
    value = 0
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def file_xxh3(path: Path) -> int:
    """XXH3-64 of a file's bytes: weights are gigabytes, and CRC-32 takes a second for each. Blocks while it reads.

    Raises OSError, also on what is no plain file.
    """
    hasher = xxhash.xxh3_64()
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.intdigest()


def bytes_xxh3(data: "bytes | memoryview") -> int:
    """XXH3-64 of bytes."""
    return xxhash.xxh3_64_intdigest(data)
