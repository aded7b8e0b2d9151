"""Decide when a lost engine is restarted, and when its failures are a crash loop."""

import time
from collections import deque
from collections.abc import Callable

from penstock.config import EngineConfig
from penstock.system.stop import pause_s
from penstock.text import redact

#: Lines of a log shown with a reason.
SHOWN_LINES = 8
#: Longest published reason, in characters.
SHOWN_CHARS = 2000


class Restarts:
    """Count the failures of one worker's engine, and compute the wait before the next start.

    A failure is a start that failed, or a crash before anything was finished. The first is followed by a start at once,
    the k-th by one after ``restart_wait_s * 2 ** (k - 2)``, at most ``max_restart_wait_s``.
    ``crash_loop_failures`` of them within ``crash_loop_window_s`` are a crash loop, which ends when an engine is
    stable, or when the failures are older than the window.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._failures: deque[float] = deque()

    def note_failure(self) -> None:
        """Record that the engine failed to start, or crashed before it finished anything."""
        self._failures.append(self._clock())

    def note_settled(self) -> None:
        """Record that the engine lived long enough, or finished something: earlier failures no longer count."""
        self._failures.clear()

    @property
    def count(self) -> int:
        """Failures within the window."""
        while self._failures and self._failures[0] < self._clock() - self._config.crash_loop_window_s:
            self._failures.popleft()
        return len(self._failures)

    @property
    def is_loop(self) -> bool:
        return self.count >= self._config.crash_loop_failures

    @property
    def wait_s(self) -> float:
        """Seconds from now to the next start."""
        if self.is_loop:
            return self._config.max_restart_wait_s
        return pause_s(self.count - 1, self._config.restart_wait_s, self._config.max_restart_wait_s)

    def said(self) -> str:
        """Describe the failures."""
        return f"failed {self.count} times in {self._config.crash_loop_window_s:g} s"


def shorten(reason: str) -> str:
    """Return the first and the last lines of a reason, without passwords, short enough for a table and a record."""
    lines = [line for line in redact(reason).splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES + 1:
        lines = [lines[0], *lines[-SHOWN_LINES:]]
    text = "\n".join(line[:400] for line in lines)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
