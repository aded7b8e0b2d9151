"""Alone in a folder of this machine, among the processes that share it.

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

log = logging.getLogger(__name__)

#: How often a lock that another process holds is tried; how often its holder says that it is there.
LOOK_S, BEAT_S = 0.05, 2.0
#: Who says nothing for so long stands still.
STILL_S = 30.0


class Stopped(PublishError):
    """The worker stops: no other way is tried."""


@contextmanager
def alone_in(
    file: Path, tell: Callable[[str], None] = lambda what: None, stopped: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the lock of ``file``, made where it is missing. Blocks while another process that lives holds it.

    Args:
        tell: called now and then with what is waited for; '' at its end.
        stopped: asked often; true ends the wait.

    Raises:
        PublishError: the process that holds it stands still.
        Stopped: ``stopped`` said so.
        OSError: the disk refuses.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait(handle, file, tell, stopped)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        with _beating(handle):
            yield
    finally:
        os.close(handle)


def _wait(handle: int, file: Path, tell: Callable[[str], None], stopped: Callable[[], bool]) -> None:
    said, seen, since = "", (b"", 0), time.monotonic()
    while not _locks(handle):
        if stopped():
            raise Stopped(f"another worker makes a copy in {file.parent}, and this one stops.")
        now = time.monotonic()
        if (shown := _shown(handle)) != seen:
            seen, since = shown, now
        who = f"process {seen[0].decode()}" if seen[0].isdigit() else "another process"
        if now - since > STILL_S:
            raise PublishError(
                f"{who} of this machine holds {file} and has stood still for {STILL_S:g} s: have it go on "
                "(kill -CONT), or end it."
            )
        said = f"{who} of this machine, which makes a copy in {file.parent}"
        tell(said)
        time.sleep(LOOK_S)
    if said:
        tell("")


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(handle: int) -> tuple[bytes, int]:
    """Who holds the lock, and when it said so last (ns)."""
    return os.pread(handle, 20, 0), os.fstat(handle).st_mtime_ns


@contextmanager
def _beating(handle: int) -> Iterator[None]:
    """Say from a thread of its own that this process is there."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                os.utime(handle)
            except OSError as exc:
                log.warning("the lock of this machine's copies cannot be kept fresh: %s", exc)

    thread = threading.Thread(target=beat, name="copies-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
