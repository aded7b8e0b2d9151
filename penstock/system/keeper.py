"""Keep a process that may do anything: end it in time, with all its descendants, and when its owner ends.

    owner ── start ──> keeper ── fork ──> kept process
       └── a pipe: signals for the kept process; at its end, kill -9 of the owner included, all are killed

The kept process may hold the interpreter's lock, stop itself, block signals or leave its session. The keeper runs no
user code, so it can always act. Orphans become its children (a subreaper). If the keeper is killed, the kernel kills
the kept process, and the owner adopts the rest if it is a subreaper.

``keep`` forks the keeper and the kept process off the caller, which becomes the owner. ``python -I -S keeper.py PIPE
ENDS_STOPPED COMMAND`` runs a command. Linux only; imports nothing heavy.
"""

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

#: A kept process is killed this long after its limit: by then a worker has handed back its jobs.
KILL_S = 20.0
#: Signals that ask to end, once: service managers send them to every process of the tree.
END = (signal.SIGTERM, signal.SIGINT)
#: Sent to the kept process for the second of these signals: end at once.
HURRY = signal.SIGHUP
#: Between two checks whether the owner, or an orphan, has ended.
CHECK_MS = 500

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

_started = 0


def die_with(name: str = "SIGKILL") -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that makes the kernel send this signal to the child when its parent thread ends.

    Linux only, None elsewhere. Start such children from the main thread.
    """
    if _LIBC is None:
        return None
    number, parent = int(signal.Signals[name]), os.getpid()
    return lambda: die_with_parent(parent, number)


def die_with_parent(parent: int | None, number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when the process ``parent``, which started it, ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def command(pipe: int, argv: list[str], *, ends_stopped: bool = False) -> list[str]:
    """Return argv of a keeper of a command, which must inherit the read end of a pipe.

    Args:
        ends_stopped: kill the command if it is stopped (SIGSTOP), because nothing would continue it.
    """
    return [sys.executable, "-I", "-S", __file__, str(pipe), str(int(ends_stopped)), *argv]


def started_pid() -> int:
    """Return the pid of the process that was started, which takes signals: this one, unless a keeper keeps it."""
    return _started or os.getpid()


def keep(limit_s: float, on_kill: Callable[[], object] = bool) -> None:
    """Return in a kept process, and never in this one: it ends as that process ends.

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
        _end_with(os.waitpid(keeper, 0)[1])
    os.close(writing)
    os.setsid()
    for number in (*END, HURRY):
        signal.signal(number, signal.SIG_IGN)
    if pid := _fork(reading):
        _end_with(_attend(pid, reading, _started, limit_s, on_kill))


def _send(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, bytes([number]))


def _fork(pipe: int) -> int:
    """Fork the kept process; return its pid, or 0 in it."""
    adopt_orphans()
    keeper = os.getpid()
    if not (pid := os.fork()):
        os.close(pipe)
        for number in (*END, HURRY):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(keeper)
    return pid


def _attend(
    pid: int, pipe: int, owner: int, limit_s: float, on_kill: Callable[[], object], *, ends_stopped: bool = False
) -> int:
    """Forward signals until the kept process ends or has to; return its wait status. Reaps orphans."""
    options = os.WNOHANG | (os.WUNTRACED if ends_stopped else 0)
    poll, count, deadline = select.poll(), 0, math.inf
    poll.register(pipe, select.POLLIN)
    poll.register(os.pidfd_open(pid), select.POLLIN)
    while time.monotonic() < deadline:
        ready = [fd for fd, _ in poll.poll(CHECK_MS)]
        message = os.read(pipe, 64) if pipe in ready else None
        while (ended := os.waitpid(-1, options))[0]:
            if ended[0] == pid:
                return ended[1]
        # A fork of the owner may hold the pipe.
        if message == b"" or os.getppid() != owner:
            return signal.SIGKILL
        for number in message or ():
            count += 1
            deadline = min(deadline, time.monotonic() + (limit_s if count == 1 else 0.0) + KILL_S)
            os.kill(pid, number if count == 1 else HURRY)
            # A stopped process takes no other signal.
            os.kill(pid, signal.SIGCONT)
    import logging

    logging.getLogger(__name__).error("killing the process and all that it started: it did not end in time")
    _kill_children()
    on_kill()
    return signal.SIGKILL


def _kill_children() -> None:
    """Kill all descendants; they become children of this process, which adopts orphans. Blocks until none is left."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _end_with(status: int) -> NoReturn:
    """Kill all descendants and end as the process with this wait status did."""
    _kill_children()
    if os.WIFSTOPPED(status):
        os._exit(128 + os.WSTOPSIG(status))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Process 1 of a container is not ended by its own signal.
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    """Keep a command running; end as it ends. SIGTERM kills it."""
    pipe, ends_stopped, command, owner = int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:], os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: _end_with(signal.SIGKILL))
    if pid := _fork(pipe):
        for number in (signal.SIGINT, HURRY):
            signal.signal(number, signal.SIG_IGN)
        for file in (0, 1):
            os.close(file)  # the reader of its output sees the end when the command ends
        _end_with(_attend(pid, pipe, owner, 0.0, bool, ends_stopped=ends_stopped))
    try:
        os.setsid()
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"cannot start {command[0]}: {exc}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    main()
