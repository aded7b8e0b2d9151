"""How many tokens an engine drew, by its own count: a file that is written before anybody is told of them.

One file a process. What was written is there whoever kills the process: only the machine could lose it.
"""

import os
import time
from pathlib import Path

#: Ending of such a file, among the histories.
DRAWN = ".drawn"
DIGITS = 20


class DrawnCount:
    """The count of the process that makes it. ``add`` blocks for a write into memory."""

    def __init__(self, folder: Path, who: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Pids come again in a run of many kills.
        path = folder / f"{who}-{os.getpid()}-{time.monotonic_ns()}{DRAWN}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.count = 0

    def add(self, tokens: int) -> None:
        self.count += tokens
        os.pwrite(self._file, b"%0*d" % (DIGITS, self.count), 0)


def drawn_in(path: Path) -> int:
    """The count in a file; 0 where its process drew nothing."""
    return int(path.read_bytes() or b"0")
