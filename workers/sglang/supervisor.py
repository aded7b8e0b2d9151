"""Supervise an engine so that it never outlives its worker, not even after ``kill -9``.

    python -I -S supervisor.py LIFELINE STATUS LOG COMMAND...

LIFELINE is the read end of a pipe whose write end only the worker holds: at end of file, however the worker ended,
every descendant is killed. STATUS is the write end of a second pipe: ``pid N`` once the engine runs, ``exit N`` or
``signal N`` when it ended, and end of file when no descendant is left. LOG takes the engine's output.

It leaves the worker's session (a Ctrl-C does not reach the engine) and is a child subreaper (an orphaned grandchild
becomes its child). The engine dies with the supervisor too (PR_SET_PDEATHSIG). Linux only; imports nothing heavy.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _start(command: list[str], log: str) -> int:
    """Fork the engine; return its pid."""
    supervisor = os.getpid()
    if pid := os.fork():
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"cannot start {command[0]}: {exc}\n".encode())
    os._exit(127)


def _children() -> dict[int, list[int]]:
    """Map the pid of each visible process to those of its children."""
    tree: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                # The name in parentheses may contain anything, ")" included.
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # ended meanwhile
        tree.setdefault(parent, []).append(int(entry))
    return tree


def _descendants(root: int) -> list[int]:
    tree, found, todo = _children(), [], [root]
    while todo:
        todo += (below := tree.get(todo.pop(), []))
        found += below
    return found


def _reap(engine: int) -> tuple[bool, str | None]:
    """Collect ended children; return whether any child is left, and how the engine ended if it was among them."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, ended
        if pid == 0:
            return True, ended
        if pid == engine:
            code = os.waitstatus_to_exitcode(status)
            ended = f"exit {code}" if code >= 0 else f"signal {-code}"


def _report(status: int, line: str) -> None:
    # If the worker is gone, the lifeline's end of file handles it.
    with contextlib.suppress(BrokenPipeError):
        os.write(status, line.encode() + b"\n")


def main() -> None:
    lifeline, status, log, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    if os.fork():
        os._exit(0)
    os.setsid()
    os.set_inheritable(lifeline, False)
    os.set_inheritable(status, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signals: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))

    engine = _start(command, log)
    _report(status, f"pid {engine}")
    ended = None
    while ended is None and not signals:
        readable, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in readable:
            break  # end of file: nothing is ever written to it
        os.read(woken, 4096)
        _, ended = _reap(engine)
    if ended is not None:
        _report(status, ended)
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left, _ = _reap(engine)
        if not left:
            return
        select.select([woken], [], [], 0.02)


if __name__ == "__main__":
    main()
