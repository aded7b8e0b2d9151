"""Deletion of freed payload files by a thread."""

import logging
import os
import queue
import threading
from pathlib import Path

log = logging.getLogger(__name__)


class FreedFiles:
    """Unlinks files of one folder in a thread, which may block for the file system. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        #: Files to unlink; None ends the thread.
        self._files: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, file: str) -> None:
        """Enqueue a file for deletion. Returns at once."""
        self._files.put(file)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._unlink_all, name="payload folder frees", daemon=True)
                    self._thread.start()

    def _unlink_all(self) -> None:
        while (file := self._files.get()) is not None:
            try:
                os.unlink(file)
            except FileNotFoundError:
                continue
            except OSError as exc:
                # ``PayloadFolder.expire`` finds it again.
                log.warning("a payload that is not needed any more stays in %s: %s", self._folder, exc)

    def close(self, silent_s: float) -> None:
        """Unlink the remaining files. Blocks for at most ``silent_s`` after the last file."""
        if self._thread is None:
            return
        self._files.put(None)
        left = -1
        while self._thread.is_alive() and (there := self._files.qsize()) != left:
            left = there
            self._thread.join(silent_s)
        if self._thread.is_alive():
            # ``PayloadFolder.expire`` finds them again.
            log.warning("payloads that are not needed any more stay in %s: it does not answer", self._folder)
        self._thread = None
