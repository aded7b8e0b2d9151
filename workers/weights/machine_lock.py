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
from contextlib import closing, contextmanager
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


class MachineLock:
    """The lock of ``file``, created if missing; this process holds it from ``try_acquire`` to ``close``.

    The file must be in an ``own_folder``: any process that can open it, even for reading, could hold its lock forever.
    Raises OSError: a disk error, or the path is another user's file or a link.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._handle = file, own_file(file)
        #: Process id of the holder; 0: unknown.
        self.holder = 0
        self._seen, self._looked_at, self._still_s = (b"", 0), time.monotonic(), 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Return whether this process holds the lock now. Raises PublishError if its holder is stalled."""
        if not locks(self._handle):
            self._check_holder()
            return False
        os.ftruncate(self._handle, 0)
        self._sign()
        self._thread = threading.Thread(target=self._beat, name="machine-lock", daemon=True)
        self._thread.start()
        return True

    def close(self) -> None:
        """Release the lock and empty the file."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def _check_holder(self) -> None:
        now, seen = time.monotonic(), (os.pread(self._handle, 20, 0), os.fstat(self._handle).st_mtime_ns)
        is_still = seen == self._seen and seen[0] != b""
        self._still_s = self._still_s + min(now - self._looked_at, LOOK_COUNTS_S) if is_still else 0.0
        self._seen, self._looked_at = seen, now
        self.holder = int(seen[0]) if seen[0].isdigit() else 0
        if self._still_s > STILL_S:
            raise PublishError(
                f"{process_name(self.holder)} holds {self._file} and has been stalled for {STILL_S:g} s: resume it "
                "(kill -CONT), or end it.",
                LockHolderStalled(self.holder, str(self._file)),
            )

    def _sign(self) -> None:
        """Write the process id; on a full disk only mark the file, so that this process can free space there."""
        try:
            os.pwrite(self._handle, str(os.getpid()).encode(), 0)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            os.ftruncate(self._handle, 1)  # a sparse file needs no space

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                os.utime(self._handle)
            except OSError as exc:
                log.warning("failed to renew a lock of this machine: %s", exc)


@contextmanager
def alone_in(
    file: Path,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Hold the lock of ``file``. Blocks while another live process holds it.

    Args:
        blocked_on: called periodically with the cause of the wait; None at its end.
        stopped: called often; True ends the wait.

    Raises:
        PublishError: the process that holds the lock is stalled.
        Stopped: ``stopped`` returned True.
        OSError: as ``MachineLock``.
    """
    with closing(MachineLock(file)) as lock:
        while not lock.try_acquire():
            if stopped():
                raise Stopped(f"another worker fetches weights into {file.parent}, and this one stops.")
            blocked_on(FolderLocked(lock.holder, str(file.parent)))
            time.sleep(LOOK_S)
        blocked_on(None)
        yield


def locks(handle: int) -> bool:
    """Return whether this process has the lock of ``handle``; does not block."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
