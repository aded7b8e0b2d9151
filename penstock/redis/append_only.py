"""Sync of our own server's append-only file once a second, by its keeper.

The result is in the file ``synced`` of the server's folder, for ``penstock doctor``: its time is that of the last
successful sync, its text the error since.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.redis.connect import as_redis, connect
from penstock.text import format_exc, utf8_safe

#: Seconds between two syncs: what a power loss may lose.
EVERY_S = 1.0

#: Redis 7 has its files in a folder, 6.2 a single one.
FILES = ("appendonlydir/*.aof", "appendonly.aof")

#: ``syslog-ident`` of a server that is synced so; clients can read it, and it has no effect while syslog is off.
IDENT = "penstock-syncs-each-second"

#: File in the server's folder.
NOTE = "synced"
#: Most characters of an error.
MAX_TROUBLE = 1000

#: Longest wait for an answer of the server.
ANSWER_S = 2.0
#: Seconds between two attempts to rewrite the file.
REWRITE_AGAIN_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Synced:
    """The last record of a server's keeper."""

    #: Seconds since the last successful sync, by this machine's clock.
    age_s: float
    #: Error since then; '' without one.
    trouble: str


class Server(Protocol):
    """The server's side of failing syncs. Neither call blocks for long; both are repeated if they raise."""

    def hand_over(self) -> None:
        """Let the server sync by itself from now on."""

    def take_back(self) -> bool:
        """Return to syncs by the keeper once the file is complete; False: not yet, call again.

        The kernel may have dropped pages that it could not write, and a later successful sync does not show that: the
        file is rewritten first.
        """


class ToldByKeeper:
    """A server that its keeper configures, as a user with rights that clients do not have.

    Args:
        url: returns its address with that user's password.
    """

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        #: When (monotonic) the file was rewritten after a failed sync; 0.0: not yet.
        self._rewrite_at = 0.0

    def hand_over(self) -> None:
        """Let the server sync by itself; see Server. Blocks for a round trip. Raises RedisError."""
        self._rewrite_at = 0.0
        with connect(self._url(), timeout_s=ANSWER_S, check=False) as client:
            as_redis(client).config_set("appendfsync", "everysec")

    def take_back(self) -> bool:
        """Rewrite the file, then stop the server's syncs; see Server. Blocks for two round trips. Raises RedisError."""
        with connect(self._url(), timeout_s=ANSWER_S, check=False) as client:
            now = client.info("persistence")
            if now["aof_rewrite_in_progress"] or now["aof_rewrite_scheduled"]:
                return False
            failed = now["aof_last_bgrewrite_status"] != "ok"
            if not self._rewrite_at or (failed and time.monotonic() - self._rewrite_at > REWRITE_AGAIN_S):
                client.bgrewriteaof()
                self._rewrite_at = time.monotonic()
                return False
            if failed or now["aof_last_write_status"] != "ok":
                return False
            as_redis(client).config_set("appendfsync", "no")
            return True


class AppendOnlySync:
    """Calls ``fdatasync`` for the append-only file each second, in a thread.

    Redis' own ``everysec`` delays its writes for up to two seconds during a sync (``flushAppendOnlyFile`` in its aof.c)
    and answers its clients meanwhile: on a slow disk kill -9 loses acknowledged writes. With ``appendfsync no`` each
    write is in the kernel before its client has an answer, and kill -9 loses nothing; syncing from outside bounds the
    loss of a power failure as ``everysec`` does.

    Args:
        folder: the server's ``dir``.
        server: called from the thread when a sync fails, and when one succeeds again. Redis takes no writes while
            its own syncs fail, as every server with ``everysec``.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder = folder
        self._server = server
        #: Ends the thread; None if it is not running.
        self._ended: threading.Event | None = None
        #: File -> its inode, size and time at its last sync.
        self._synced: dict[Path, tuple[int, int, int]] = {}
        #: Error of the last sync; '': it succeeded.
        self._trouble = ""
        self._is_handed_over = False

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._ended is None:
            self._is_handed_over = False
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="append-only-sync", daemon=True).start()

    def stop(self) -> None:
        """Start no other sync. A running one ends by itself: a hanging disk does not block the caller."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def sync(self) -> None:
        """Sync what was written since the last call, and record the result. Blocks for the disk."""
        try:
            for path in (path for pattern in FILES for path in self._folder.glob(pattern)):
                self._sync_file(path)
        # Any error: the end of this thread would go unnoticed.
        except Exception as exc:
            self._fail(utf8_safe(format_exc(exc), MAX_TROUBLE))
        else:
            self._note("")
            if self._is_handed_over:
                self._take_back()

    def _take_back(self) -> None:
        try:
            done = self._server.take_back()
        except Exception as exc:
            log.debug("the append-only file in %s cannot be written anew yet: %s", self._folder, format_exc(exc))
            return
        if done:
            log.warning("the append-only file in %s was written anew, and is synced as before", self._folder)
            self._is_handed_over = False

    def _fail(self, trouble: str) -> None:
        is_new = not self._trouble
        if is_new:
            log.error(
                "the append-only file in %s cannot be synced (%s): a power loss may lose what Redis has acknowledged "
                "since; Redis syncs it by itself now, and takes no writes while that fails: look at the disk",
                self._folder,
                trouble,
            )
        self._note(trouble)
        if self._is_handed_over and not is_new:
            return
        try:
            self._server.hand_over()
        except Exception as exc:
            if is_new:
                log.error("failed to make Redis sync its append-only file, will retry: %s", format_exc(exc))
        else:
            self._is_handed_over = True

    def _note(self, trouble: str) -> None:
        """Write the note for readers; if even that fails, the note's age shows it."""
        path = self._folder / NOTE
        changed, self._trouble = trouble != self._trouble, trouble
        try:
            if changed or not path.exists():
                at = path.stat().st_mtime if trouble and path.exists() else time.time()
                path.write_text(trouble)
                os.utime(path, (at, at))
            elif not trouble:
                os.utime(path)
        except OSError as exc:
            log.debug("%s cannot be written: %s", path, exc)

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
        while not ended.is_set():
            self.sync()
            ended.wait(EVERY_S)


def read_synced(folder: Path) -> Synced | None:
    """Return the last record of the keeper of the server in ``folder``; None if there is no note here."""
    try:
        with (folder / NOTE).open() as file:
            return Synced(time.time() - os.fstat(file.fileno()).st_mtime, file.read(MAX_TROUBLE))
    except (OSError, ValueError):
        return None
