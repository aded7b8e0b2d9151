"""Decide when a process that failed is started again, and when its failures are a crash loop."""

import time
from collections import deque
from collections.abc import Callable

from penstock.system.stop import pause_s


class Restarts:
    """Count the failures of one process, and compute the wait before its next start.

    The first failure is followed by a start at once, the k-th by one after ``first_s * 2 ** (k - 2)``, at most
    ``most_s``. ``max_failures`` of them within ``window_s`` are a crash loop, which ends when the process is stable,
    or when the failures are older than the window.
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        window_s: float,
        max_failures: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.window_s = window_s
        self._max_failures = max_failures
        self._clock = clock
        self._failures: deque[float] = deque()

    def note_failure(self) -> None:
        """Record that the process failed to start, or crashed before it finished anything."""
        self._failures.append(self._clock())

    def note_settled(self) -> None:
        """Record that the process lived long enough, or finished something: earlier failures no longer count."""
        self._failures.clear()

    @property
    def count(self) -> int:
        """Failures within the window."""
        while self._failures and self._failures[0] < self._clock() - self.window_s:
            self._failures.popleft()
        return len(self._failures)

    @property
    def is_loop(self) -> bool:
        return self.count >= self._max_failures

    @property
    def wait_s(self) -> float:
        """Seconds from now to the next start."""
        return self._most_s if self.is_loop else pause_s(self.count - 1, self._first_s, self._most_s)
