"""A clock that is wrong: what a Python process reads of the wall clock is moved by what stands in a file.

libfaketime 0.9 breaks ``time.sleep`` of Python 3.11, so Python's own functions are replaced in their module, where all
parts of penstock look them up (``time.time()``); the monotonic clock stays right, as it does when somebody sets a
machine's clock.
"""

import time
from collections.abc import Callable
from pathlib import Path

#: Between two looks at the file (monotonic seconds).
LOOK_S = 0.05


class FalseClock:
    """Reads the wall clock, and adds the seconds that stand in ``told``; nothing where it cannot be read."""

    def __init__(self, told: Path, true: Callable[[], int] = time.time_ns) -> None:
        self._told = told
        self._true = true
        self._look_at = 0.0
        self._off_ns = 0

    def time_ns(self) -> int:
        """As of the module ``time``."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            try:
                self._off_ns = int(float(self._told.read_text()) * 1e9)
            except (OSError, ValueError):
                self._off_ns = 0
        return self._true() + self._off_ns

    def time(self) -> float:
        """As of the module ``time``."""
        return self.time_ns() / 1e9

    def install(self) -> None:
        """From now on for the whole process."""
        time.time_ns = self.time_ns
        time.time = self.time
