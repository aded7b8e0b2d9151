"""Finds processes that a part of a run starts itself, by its children or by what it logged."""

import re
from collections.abc import Callable

from tests.chaos.cluster.processes import children, command_of
from tests.chaos.cluster.supervisor import Part


def child_of(part: Part, words: str) -> Callable[[], int]:
    """Finds the pid of the child of ``part`` whose command has ``words``; 0 where there is none now."""
    return lambda: next((pid for pid in children(part.pid) if words in command_of(pid)), 0) if part.is_alive else 0


def logged_by(part: Part, pattern: re.Pattern[str]) -> Callable[[], int]:
    """Finds the pid that ``part`` logged last, as the first group of ``pattern``; 0 where it logged none."""

    def find() -> int:
        found = pattern.findall(part.log.read_text(errors="replace")) if part.is_alive and part.log.exists() else []
        return int(found[-1]) if found else 0

    return find
