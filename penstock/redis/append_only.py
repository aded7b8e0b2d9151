"""The append-only file of our own server, which its keeper takes to disk once a second."""

import logging
import os
import threading
from pathlib import Path

#: Between two syncs: what a power loss may lose.
EVERY_S = 1.0

#: Redis 7 has its files in a folder, 6.2 a single one.
FILES = ("appendonlydir/*.aof", "appendonly.aof")

#: ``syslog-ident`` of a server that is synced so; it can be asked for, and means nothing else where syslog is off.
IDENT = "penstock-syncs-each-second"

log = logging.getLogger(__name__)


class AppendOnlySync:
    """``fdatasync`` of the append-only file each second, in a thread.

    Redis' own ``everysec`` holds its writes back for up to two seconds while a sync is under way
    (``flushAppendOnlyFile`` in its aof.c) and answers its clients meanwhile: on a slow disk kill -9 loses what it
    acknowledged. With ``appendfsync no`` each write is the kernel's before its client has an answer, and kill -9 loses
    nothing; syncing from outside bounds what a power loss may lose as ``everysec`` does.

    Args:
        folder: the server's ``dir``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: Ends the thread; None while there is none.
        self._ended: threading.Event | None = None
        #: File -> its inode, size and time when it was synced last.
        self._synced: dict[Path, tuple[int, int, int]] = {}
        self._warned = False

    def start(self) -> None:
        """Begin; does nothing where it has begun."""
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="append-only-sync", daemon=True).start()

    def stop(self) -> None:
        """Begin no other sync. One that is under way ends by itself: a disk that hangs holds up nobody here."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def sync(self) -> None:
        """Sync what was written since the last time. Blocks for as long as the disk takes."""
        try:
            for path in (path for pattern in FILES for path in self._folder.glob(pattern)):
                self._sync_file(path)
        except OSError as exc:
            if not self._warned:
                log.warning(
                    "the append-only file in %s cannot be synced (%s), and a power loss may lose more than a second",
                    self._folder,
                    exc,
                )
            self._warned = True
        else:
            self._warned = False

    def _sync_file(self, path: Path) -> None:
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # a rewrite has replaced it
            self._synced.pop(path, None)
            return
        try:
            now = os.fstat(opened)
            seen = (now.st_ino, now.st_size, now.st_mtime_ns)
            if self._synced.get(path) != seen:
                os.fdatasync(opened)
                self._synced[path] = seen
        finally:
            os.close(opened)

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_S):
            self.sync()
