"""An exclusive lock on a folder, among the processes of this machine.

The kernel ends the lock with its holder's process, but not while that stands still (SIGSTOP, a debugger). So whoever
holds it says so in the file, every ``BEAT_S``, and who waits names that process, and gives up on one that says nothing.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.causes import Cause, FolderLocked, LockHolderStalled, process_name
from penstock.system.disk import FULL, own_file

log = logging.getLogger(__name__)

#: How often a lock that another process holds is tried; how often its holder says that it is there.
LOOK_S, BEAT_S = 0.05, 2.0
#: Who says nothing for so long stands still; of the time between two looks so much counts, as he who looks may have
#: stood still himself, together with all of his machine's or container's.
STILL_S, LOOK_COUNTS_S = 30.0, 1.0


class Stopped(PublishError):
    """The worker stops: no alternative is tried."""


@contextmanager
def alone_in(
    file: Path,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Hold the lock of ``file``, made where it is missing. Blocks while another process that lives holds it.

    The file must be in an ``own_folder``: who may open it, for reading too, can hold its lock for ever.

    Args:
        blocked_on: called now and then with the cause of the wait; None at its end.
        stopped: asked often; true ends the wait.

    Raises:
        PublishError: the process that holds it stands still.
        Stopped: ``stopped`` said so.
        OSError: the disk refuses, or another user's file or a link is there.
    """
    handle = own_file(file)
    try:
        _wait(handle, file, blocked_on, stopped)
        with telling(handle):
            yield
    finally:
        os.close(handle)


class Holder:
    """The holder of the lock of ``file``, as seen by a process that waits with a handle of that file."""

    def __init__(self, handle: int, file: Path) -> None:
        self._handle, self._file = handle, file
        self._seen, self._looked_at, self._still_s = (b"", 0), time.monotonic(), 0.0

    def process(self) -> int:
        """Return its process id; 0: not known. Raises PublishError where a process that signed the file stalls."""
        now, shown = time.monotonic(), _shown(self._handle)
        is_still = shown == self._seen and shown[0] != b""
        self._still_s = self._still_s + min(now - self._looked_at, LOOK_COUNTS_S) if is_still else 0.0
        self._seen, self._looked_at = shown, now
        pid = int(shown[0]) if shown[0].isdigit() else 0
        if self._still_s > STILL_S:
            raise PublishError(
                f"{process_name(pid)} holds {self._file} and has stood still for {STILL_S:g} s: have it go on (kill "
                "-CONT), or end it.",
                LockHolderStalled(pid, str(self._file)),
            )
        return pid


def _wait(handle: int, file: Path, blocked_on: Callable[[Cause | None], None], stopped: Callable[[], bool]) -> None:
    waited, holder = False, Holder(handle, file)
    while not locks(handle):
        if stopped():
            raise Stopped(f"another worker makes a copy in {file.parent}, and this one stops.")
        blocked_on(FolderLocked(holder.process(), str(file.parent)))
        waited = True
        time.sleep(LOOK_S)
    if waited:
        blocked_on(None)


def locks(handle: int) -> bool:
    """Return whether this process has the lock of ``handle``; does not block."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(handle: int) -> tuple[bytes, int]:
    """Return the holder of the lock, and when it last renewed its entry (ns)."""
    return os.pread(handle, 20, 0), os.fstat(handle).st_mtime_ns


@contextmanager
def telling(handle: int) -> Iterator[None]:
    """Say that this process has the lock of ``handle``, and from a thread of its own that it is still there.

    A lock that nobody holds names nobody and takes no room. On a full disk its holder signs without a name, as it may
    be there to make room. Raises OSError where the disk refuses otherwise.
    """
    os.ftruncate(handle, 0)
    _sign(handle)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                os.utime(handle)
            except OSError as exc:
                log.warning("a lock of this machine cannot be kept fresh: %s", exc)

    thread = threading.Thread(target=beat, name="machine-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.ftruncate(handle, 0)


def _sign(handle: int) -> None:
    try:
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        os.ftruncate(handle, 1)  # takes no room
