"""Lock a folder exclusively among the processes of this machine, and detect a stalled holder.

The kernel releases the lock when its holder dies, but not if it stalls (SIGSTOP, a debugger). So the holder writes its
process id to the file and renews the file's mtime every ``BEAT_S``; waiting processes report the holder and fail if it
stops renewing.
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

#: Polling interval for a held lock; heartbeat interval of its holder.
LOOK_S, BEAT_S = 0.05, 2.0
#: A holder without a heartbeat for this long is stalled. At most ``LOOK_COUNTS_S`` counts per poll, because the waiting
#: process, or the whole machine, may have been suspended itself.
STILL_S, LOOK_COUNTS_S = 30.0, 1.0


class Stopped(PublishError):
    """The worker stops: no alternative is tried."""


@contextmanager
def alone_in(
    file: Path,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Hold the lock of ``file``, created if missing. Blocks while another live process holds it.

    The file must be in an ``own_folder``: any process that can open it, even for reading, could hold its lock forever.

    Args:
        blocked_on: called periodically with the cause of the wait; None at its end.
        stopped: called often; True ends the wait.

    Raises:
        PublishError: the process that holds the lock is stalled.
        Stopped: ``stopped`` returned True.
        OSError: a disk error, or the path is another user's file or a link.
    """
    handle = own_file(file)
    try:
        _wait(handle, file, blocked_on, stopped)
        with telling(handle):
            yield
    finally:
        os.close(handle)


class Holder:
    """Observe the holder of the lock of ``file``, for a process that waits with a handle of that file."""

    def __init__(self, handle: int, file: Path) -> None:
        self._handle, self._file = handle, file
        self._seen, self._looked_at, self._still_s = (b"", 0), time.monotonic(), 0.0

    def process(self) -> int:
        """Return the holder's process id; 0: unknown. Raises PublishError if the holder is stalled."""
        now, shown = time.monotonic(), _shown(self._handle)
        is_still = shown == self._seen and shown[0] != b""
        self._still_s = self._still_s + min(now - self._looked_at, LOOK_COUNTS_S) if is_still else 0.0
        self._seen, self._looked_at = shown, now
        pid = int(shown[0]) if shown[0].isdigit() else 0
        if self._still_s > STILL_S:
            raise PublishError(
                f"{process_name(pid)} holds {self._file} and has been stalled for {STILL_S:g} s: resume it (kill "
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
    """Write the process id to the locked file and renew its mtime from a thread.

    The file is emptied on release. On a full disk it is marked without the process id, so that the holder can still
    free space. Raises OSError on other disk errors.
    """
    os.ftruncate(handle, 0)
    _sign(handle)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                os.utime(handle)
            except OSError as exc:
                log.warning("failed to renew a lock of this machine: %s", exc)

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
        os.ftruncate(handle, 1)  # a sparse file needs no space
