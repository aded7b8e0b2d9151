"""Read files whose names and sizes come from others: no links, no pipes, and no more bytes than the file has."""

import ctypes
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.payloads.run_files import GONE

#: Longest time from a write to its sync.
SYNC_S = 1.0

log = logging.getLogger(__name__)


class WriteBack:
    """Syncs the file system of one folder within ``SYNC_S`` of a write. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._dirty = threading.Event()
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        """Request a sync after a write. Returns at once."""
        self._dirty.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._keep_synced, name="payload folder", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Sync now if something was written. Blocks."""
        if self._thread is not None and self._dirty.is_set():
            self._sync()

    def _keep_synced(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            self._sync()
            time.sleep(SYNC_S)

    def _sync(self) -> None:
        """Sync the file system of the folder, and no other if the system can distinguish them."""
        try:
            folder = os.open(self._path, os.O_RDONLY)
            try:
                syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
                if syncfs is None:
                    os.sync()
                elif syncfs(folder):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(folder)
        except OSError as exc:
            log.warning("payloads in %s may not be on the disk: %s", self._path, exc)


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
