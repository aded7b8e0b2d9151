"""Read files whose names and sizes come from others: no links, no pipes, and no more bytes than the file has."""

import errno
import os
import stat
from collections.abc import Callable

from penstock.payloads.run_files import GONE

#: Never block for the writer of a pipe.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Errors for other than plain files: a link, a socket, a device without a driver.
_NO_FILE = GONE | {errno.ELOOP, errno.ENXIO, errno.ENODEV}
#: Bytes read at once.
_CHUNK = 16 * 1024 * 1024

#: Returns (first byte, number of bytes) to read from a file of this size; None: it is not the right one.
Pick = Callable[[int], tuple[int, int] | None]


def whole(most: int, size: int) -> tuple[int, int] | None:
    """Select all of a file of ``size`` bytes, if it has at most ``most``."""
    return (0, size) if size <= most else None


def part(begin: int, num_bytes: int, size: int) -> tuple[int, int] | None:
    """Select ``num_bytes`` of a file of ``size`` bytes, if it has all of them."""
    return (begin, num_bytes) if 0 <= begin <= begin + num_bytes <= size else None


def read_file(path: str, pick: Pick, step: Callable[[], None]) -> bytes | None:
    """Read the part of a file that ``pick`` selects; None if it is not a plain file, or ends before.

    Blocks, and calls ``step`` after each piece. Raises OSError.
    """
    try:
        file = os.open(path, _FLAGS)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            return None
        raise
    try:
        found = os.fstat(file)
        picked = pick(found.st_size) if stat.S_ISREG(found.st_mode) else None
        return None if picked is None else _read_all(file, *picked, step)
    finally:
        os.close(file)


def _read_all(file: int, begin: int, num_bytes: int, step: Callable[[], None]) -> bytes | None:
    chunks, end = [], begin + num_bytes
    while begin < end:
        chunks.append(os.pread(file, min(end - begin, _CHUNK), begin))
        if not chunks[-1]:
            return None
        begin += len(chunks[-1])
        step()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
