"""The append-only file of our own server, which its keeper takes to disk once a second.

What became of the syncs stands in the file ``synced`` of the server's folder, for ``penstock doctor``: its time is that
of the last good one, its text the trouble since.
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

#: Between two syncs: what a power loss may lose.
EVERY_S = 1.0

#: Redis 7 has its files in a folder, 6.2 a single one.
FILES = ("appendonlydir/*.aof", "appendonly.aof")

#: ``syslog-ident`` of a server that is synced so; it can be asked for, and means nothing else where syslog is off.
IDENT = "penstock-syncs-each-second"

#: In the folder of the server.
NOTE = "synced"
#: Most characters of a trouble.
MAX_TROUBLE = 1000

#: Longest wait for an answer of the server.
ANSWER_S = 2.0
#: Between two tries to have the file written anew.
REWRITE_AGAIN_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Synced:
    """What the keeper of a server noted last."""

    #: Seconds since the last good sync, by this machine's clock.
    age_s: float
    #: Why none was good since; '' where none has failed.
    trouble: str


class Server(Protocol):
    """What a server does about syncs that fail. Neither call blocks for long; both are made again where they raise."""

    def hand_over(self) -> None:
        """Sync by itself from now on."""

    def take_back(self) -> bool:
        """Its keeper can sync again: go back to that, as soon as the file is whole; False: not yet, ask again.

        What the kernel could not write it may have dropped, and a later sync that succeeds says nothing of that: the
        file is written anew first.
        """


class ToldByKeeper:
    """A server that a user of its own tells, who may set what clients may not.

    Args:
        url: its address as that user, password included.
    """

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        #: When (monotonic) the file was written anew since a sync failed; 0.0: not yet.
        self._rewrite_at = 0.0

    def hand_over(self) -> None:
        """As in Server. Blocks for a round trip. Raises RedisError."""
        self._rewrite_at = 0.0
        with connect(self._url(), timeout_s=ANSWER_S, check=False) as client:
            as_redis(client).config_set("appendfsync", "everysec")

    def take_back(self) -> bool:
        """As in Server. Blocks for two round trips. Raises RedisError."""
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
    """``fdatasync`` of the append-only file each second, in a thread.

    Redis' own ``everysec`` holds its writes back for up to two seconds while a sync is under way
    (``flushAppendOnlyFile`` in its aof.c) and answers its clients meanwhile: on a slow disk kill -9 loses what it
    acknowledged. With ``appendfsync no`` each write is the kernel's before its client has an answer, and kill -9 loses
    nothing; syncing from outside bounds what a power loss may lose as ``everysec`` does.

    Args:
        folder: the server's ``dir``.
        server: is called from the thread when a sync fails, and when one is good again. Redis takes no writes while
            its own syncs fail, as every server with ``everysec``.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder = folder
        self._server = server
        #: Ends the thread; None while there is none.
        self._ended: threading.Event | None = None
        #: File -> its inode, size and time when it was synced last.
        self._synced: dict[Path, tuple[int, int, int]] = {}
        #: How the last sync failed; '': it did not.
        self._trouble = ""
        self._is_handed_over = False

    def start(self) -> None:
        """Begin; does nothing where it has begun."""
        if self._ended is None:
            self._is_handed_over = False
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=(self._ended,), name="append-only-sync", daemon=True).start()

    def stop(self) -> None:
        """Begin no other sync. One that is under way ends by itself: a disk that hangs holds up nobody here."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def sync(self) -> None:
        """Sync what was written since the last time, and note how that went. Blocks for as long as the disk takes."""
        try:
            for path in (path for pattern in FILES for path in self._folder.glob(pattern)):
                self._sync_file(path)
        # Whatever it is: a thread that ended would be missed by nobody.
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
                log.error(
                    "Redis could not be told to sync its append-only file, and is told again: %s", format_exc(exc)
                )
        else:
            self._is_handed_over = True

    def _note(self, trouble: str) -> None:
        """Leave it for whoever looks; where the disk does not take even that, the note's age tells."""
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
    """What the keeper of the server in ``folder`` noted last; None where there is no such note here."""
    try:
        with (folder / NOTE).open() as file:
            return Synced(time.time() - os.fstat(file.fileno()).st_mtime, file.read(MAX_TROUBLE))
    except (OSError, ValueError):
        return None
