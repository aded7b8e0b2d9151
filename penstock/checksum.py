"""Checksums of files: what a publication announces, a worker verifies and a checkpoint is named by."""

import zlib
from pathlib import Path

_CHUNK_BYTES = 16 * 1024 * 1024


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes. Blocks while it reads them."""
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
