"""Keep a process that runs user code: end it in time, with everything that it started.

    started ── fork ──> keeper ── fork ──> kept (the worker)
       └── a pipe: the signals that the started process gets, and its end

User code runs in the kept process alone, where it may hold the interpreter's lock, stop the process or block signals.
The keeper runs none, so it can always act: it forwards signals, and sends SIGKILL when time is over. Orphans become
its children (a subreaper), so a process that left the session is found too. It has a session of its own: Ctrl-C and
a kill of the process group reach the started process alone.

Two processes are too few: with a keeper that is the started process, nothing would be left to end the descendants
after kill -9 of it. Of these three any one may be killed: the kernel ends the kept process with the keeper, and the
started process adopts and ends what the keeper leaves.
"""

import contextlib
import logging
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock.system.processes import adopt_orphans, die_with_parent

#: A kept process is killed this long after its limit: by then it has handed back its jobs and stopped its engine.
KILL_S = 20.0
#: Signals that ask to end, once: service managers send them to every process of the tree.
END = (signal.SIGTERM, signal.SIGINT)
#: Sent to the kept process for the second of these signals: end at once.
HURRY = signal.SIGHUP
#: Between two checks whether a process was stopped, or an orphan ended.
CHECK_MS = 500

log = logging.getLogger(__name__)

_started = 0


def started_pid() -> int:
    """Return the pid of the process that was started, which takes signals: this one, unless a keeper keeps it."""
    return _started or os.getpid()


def keep(limit_s: float, on_kill: Callable[[], object] = bool) -> None:
    """Return in a process of its own, and never in this one: it ends as that process ends.

    Call in the main thread, before anything is opened that processes cannot share. Only Linux has what it needs;
    elsewhere it does nothing.

    Args:
        limit_s: time that the kept process has after the first signal, and ``KILL_S`` more; after the second signal
            it has ``KILL_S``.
        on_kill: called in the keeper after it killed the kept process because that time was over.
    """
    global _started
    if not hasattr(os, "pidfd_open"):
        return
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    _started = os.getpid()
    adopt_orphans()
    if keeper := os.fork():
        os.close(reading)
        for number in END:
            signal.signal(number, lambda number, _: _send(writing, number))
        end_with(os.waitpid(keeper, 0)[1])
    os.close(writing)
    os.setsid()
    adopt_orphans()
    parent = os.getpid()
    if not (pid := os.fork()):
        os.close(reading)
        die_with_parent(parent)
        return
    for number in (*END, HURRY):
        signal.signal(number, signal.SIG_IGN)
    end_with(_forward(Kept(pid, reading), limit_s, on_kill))


def _send(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, bytes([number]))


class Kept:
    """A child of this process, and the pipe whose end means that it has to end."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self.pipe = pid, pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._poll.register(os.pidfd_open(pid), select.POLLIN)

    def wait(self) -> tuple[int | None, bytes | None]:
        """Wait for a moment. Reaps orphans.

        Returns:
            The child's wait status where it ended or was stopped, else None; and what came through the pipe, b"" at
            its end, else None.
        """
        ready = [fd for fd, _ in self._poll.poll(CHECK_MS)]
        message = os.read(self.pipe, 64) if self.pipe in ready else None
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid in (0, self.pid):
                return status if pid else None, message


def _forward(kept: Kept, limit_s: float, on_kill: Callable[[], object]) -> int:
    """Forward signals until the process ends or has to; return its wait status."""
    count, deadline = 0, math.inf
    while time.monotonic() < deadline:
        status, message = kept.wait()
        if status is not None and not os.WIFSTOPPED(status):
            return status
        if message == b"":
            return signal.SIGKILL
        for number in message or ():
            count += 1
            deadline = min(deadline, time.monotonic() + (limit_s if count == 1 else 0.0) + KILL_S)
            os.kill(kept.pid, number if count == 1 else HURRY)
            # A stopped process takes no other signal.
            os.kill(kept.pid, signal.SIGCONT)
    log.error("killing the process and all that it started: it did not end in time (signals received: %d)", count)
    kill_children()
    on_kill()
    return signal.SIGKILL


def kill_children() -> None:
    """Kill all descendants; they become children of this process, which adopts orphans. Blocks until none is left."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def end_with(status: int) -> NoReturn:
    """Kill all descendants and end as the process with this wait status did."""
    kill_children()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Process 1 of a container is not ended by its own signal.
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
