"""Sync of payload folders to disk, by a thread, for many writes at once."""

import ctypes
import logging
import os
import threading
import time
from pathlib import Path

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
