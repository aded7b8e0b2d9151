"""Looks at processes of this machine, by /proc."""

from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that ``pid`` started, none where it is gone."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:  # it ended meanwhile
            continue
    return found


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """(depth, pid) of all processes below ``pid``; its children have depth 1."""
    for child in children(pid):
        yield 1, child
        yield from ((depth + 1, other) for depth, other in descendants(child))


def kept(pid: int) -> list[int]:
    """``pid`` of a worker or of a pool of verifiers, its keeper and, last, the process that works; those there are."""
    found = [pid]
    # Each is a fork of the one above, which adopts orphans after it.
    while len(found) < 3 and (below := children(found[-1])) and command_of(below[0]) == command_of(pid):
        found.append(below[0])
    return found


def command_of(pid: int) -> str:
    """The command of a process, a blank behind every word; '' where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether the process is there, and not only its exit code."""
    try:
        return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
