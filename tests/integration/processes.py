"""Looking at real processes, and waiting for their end."""

import os
import select
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Pids of all processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kept_by(pid: int) -> tuple[int, int]:
    """(keeper, worker) of the process of ``penstock worker`` that was started; 0 for one that is not there yet."""
    keeper = _first_child(pid)
    return keeper, _first_child(keeper)


def _first_child(pid: int) -> int:
    """Return the oldest child: orphans are adopted after it."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    """Command line of a process; SGLang's children carry their role in it."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def open_pidfds(pids: list[int]) -> dict[int, int]:
    """Pid -> a file descriptor that becomes readable when exactly that process has ended."""
    return {pid: os.pidfd_open(pid) for pid in pids}


def wait_gone(pidfds: dict[int, int], timeout_s: float) -> list[int]:
    """Wait until the processes have ended; returns the pids of those that have not."""
    deadline = time.monotonic() + timeout_s
    left = dict(pidfds)
    while left and (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select(list(left.values()), [], [], remaining)
        left = {pid: fd for pid, fd in left.items() if fd not in readable}
    for fd in pidfds.values():
        os.close(fd)
    return list(left)
