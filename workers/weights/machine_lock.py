"""Lock a folder exclusively among the processes of this machine, and detect a stalled holder.

The kernel releases the lock when its holder dies, but not if it stalls (SIGSTOP, a debugger). So the holder writes its
process id to the file and renews the file's mtime every ``BEAT_S``; waiting processes report the holder and fail if it
stops renewing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.worker_causes import FolderLocked, LockHolderStalled, process_name
from penstock.system.disk import FULL, locks, own_file

log = logging.getLogger(__name__)

#: Polling interval for a held lock; heartbeat interval of its holder.
LOOK_S, BEAT_S = 0.05, 2.0
#: A holder without a heartbeat for this long is stalled. Polls are counted, because the waiting process, or the whole
#: machine, may have been suspended itself.
STILL_S = 30.0


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
    with ExitStack() as stack:
        handle = own_file(file)
        stack.callback(os.close, handle)
        _acquire(handle, file, blocked_on, stopped)
        blocked_on(None)
        os.ftruncate(handle, 0)
        _sign(handle)
        stack.callback(os.ftruncate, handle, 0)
        released = threading.Event()
        thread = threading.Thread(target=_beat, args=(handle, released), name="machine-lock", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(released.set)
        yield


def _acquire(handle: int, file: Path, blocked_on: Callable[[Cause | None], None], stopped: Callable[[], bool]) -> None:
    seen, num_still = (b"", 0), 0
    while not locks(handle):
        before, seen = seen, (os.pread(handle, 20, 0), os.fstat(handle).st_mtime_ns)
        num_still = num_still + 1 if seen == before and seen[0] != b"" else 0
        holder = int(seen[0]) if seen[0].isdigit() else 0
        if num_still * LOOK_S > STILL_S:
            raise PublishError(
                f"{process_name(holder)} holds {file} and has been stalled for {STILL_S:g} s: resume it (kill -CONT), "
                "or end it.",
                LockHolderStalled(holder, str(file)),
            )
        if stopped():
            raise Stopped(f"another worker fetches weights into {file.parent}, and this one stops.")
        blocked_on(FolderLocked(holder, str(file.parent)))
        time.sleep(LOOK_S)


def _sign(handle: int) -> None:
    """Write the process id; on a full disk only mark the file, so that this process can free space there."""
    try:
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        os.ftruncate(handle, 1)  # a sparse file needs no space


def _beat(handle: int, released: threading.Event) -> None:
    while not released.wait(BEAT_S):
        try:
            os.utime(handle)
        except OSError as exc:
            log.warning("failed to renew a lock of this machine: %s", exc)
