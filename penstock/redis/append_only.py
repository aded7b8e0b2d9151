"""Sync our own server's append-only file once a second, from the process that started it.

Redis' own ``everysec`` delays its writes for up to two seconds during a sync and answers its clients meanwhile: on a
slow disk kill -9 loses acknowledged writes. With ``appendfsync no`` each write is in the kernel before its client has
an answer; syncing from outside bounds the loss of a power failure as ``everysec`` does. The file ``synced`` in the
server's folder has the time of the last successful sync, and as its text the error since.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock.redis.connect import as_redis, connect
from penstock.text import format_exc, utf8_safe

#: Seconds between two syncs: what a power loss may lose. Longest wait for an answer of the server.
EVERY_S, ANSWER_S = 1.0, 2.0
#: Redis 7 has its files in a folder, 6.2 a single one.
FILES = ("appendonlydir/*.aof", "appendonly.aof")
#: ``syslog-ident`` of a server that is synced so; clients can read it, and it has no effect while syslog is off.
IDENT = "penstock-syncs-each-second"
#: File in the server's folder, and the most characters of an error in it.
NOTE, MAX_TROUBLE = "synced", 1000

log = logging.getLogger(__name__)


class AppendOnlySync:
    """Calls ``fdatasync`` each second in a thread. While that fails, Redis syncs by itself and refuses writes.

    Args:
        folder: the server's ``dir``.
        url: returns its address, with a user that may set ``appendfsync``.
    """

    def __init__(self, folder: Path, url: Callable[[], str]) -> None:
        self._folder, self._url = folder, url
        self._ended: threading.Event | None = None
        #: File -> its inode, size and time at its last sync.
        self._synced: dict[Path, tuple[int, int, int]] = {}
        self._trouble = ""
        self._redis_syncs = self._rewritten = False

    def start(self) -> None:
        """Begin with a server that was just started, which does not sync; start the thread, unless it is running."""
        self._redis_syncs = False
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="append-only-sync", daemon=True).start()

    def stop(self) -> None:
        """Start no other sync; a hanging disk does not block the caller."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self.sync()
            ended.wait(EVERY_S)

    def sync(self) -> None:
        """Sync what was written since the last call, record the result, and switch Redis. Blocks for the disk."""
        trouble = ""
        try:
            for path in (path for pattern in FILES for path in self._folder.glob(pattern)):
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # a rewrite replaces it
                    now = os.fstat(file.fileno())
                    if self._synced.get(path) != (seen := (now.st_ino, now.st_size, now.st_mtime_ns)):
                        os.fdatasync(file.fileno())
                        self._synced[path] = seen
        except Exception as exc:  # the end of this thread would go unnoticed
            trouble = utf8_safe(format_exc(exc), MAX_TROUBLE)
        if trouble and not self._trouble:
            self._rewritten = False
            log.error(
                "the append-only file in %s cannot be synced (%s): a power loss may lose what Redis acknowledges, "
                "and it refuses writes while its own syncs fail: check the disk", self._folder, trouble,
            )  # fmt: skip
        self._trouble = trouble
        with contextlib.suppress(OSError):  # the age of the note shows that
            self._note(trouble)
        try:
            if bool(trouble) != self._redis_syncs:
                self._switch(redis_syncs=bool(trouble))
        except Exception as exc:
            log.debug("failed to switch the syncs of Redis, will retry: %s", format_exc(exc))

    def _note(self, trouble: str) -> None:
        """Write the error; the time of the file remains that of the last successful sync."""
        path = self._folder / NOTE
        at = path.stat().st_mtime if trouble and path.exists() else time.time()
        path.write_text(trouble)
        os.utime(path, (at, at))

    def _switch(self, *, redis_syncs: bool) -> None:
        """Let Redis sync, or stop its syncs after a rewrite: the kernel may have dropped pages of the file."""
        with connect(self._url(), timeout_s=ANSWER_S, check=False) as client:
            if not redis_syncs:
                now = client.info("persistence")
                if now["aof_rewrite_in_progress"] or now["aof_rewrite_scheduled"]:
                    return
                if not self._rewritten or now["aof_last_bgrewrite_status"] != "ok":
                    self._rewritten = bool(client.bgrewriteaof())
                    return
                if now["aof_last_write_status"] != "ok":
                    return
            as_redis(client).config_set("appendfsync", "everysec" if redis_syncs else "no")
        self._redis_syncs, self._rewritten = redis_syncs, False


class Synced(NamedTuple):
    """Seconds since the last successful sync, by this machine's clock, and the error since then, '' without one."""

    age_s: float
    trouble: str


def read_synced(folder: Path) -> Synced | None:
    """Return the last record of the syncs of the server in ``folder``; None if there is none."""
    try:
        with (folder / NOTE).open() as file:
            return Synced(time.time() - os.fstat(file.fileno()).st_mtime, file.read(MAX_TROUBLE))
    except (OSError, ValueError):
        return None
