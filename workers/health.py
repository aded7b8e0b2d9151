"""When a lost engine is started again, and when its failures are a crash loop."""

import time
from collections import deque
from collections.abc import Callable

from penstock.config import EngineConfig
from penstock.redaction import redact
from penstock.system.backoff import pause_s

#: Lines of a log that are shown with a reason.
SHOWN_LINES = 8
#: Longest reason that is published, in characters.
SHOWN_CHARS = 2000


class Restarts:
    """Counts the failures of one worker's engine, and says how long to wait before the next start.

    A failure is a start that failed, or a death before anything came to its end. The first is followed by a start at
    once, the k-th by one after ``restart_wait_s * 2 ** (k - 2)``, at most ``max_restart_wait_s``.
    ``crash_loop_failures`` of them within ``crash_loop_window_s`` are a crash loop, which ends when an engine has
    settled, or when the failures are older than the window.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._failures: deque[float] = deque()

    def note_failure(self) -> None:
        """The engine died before it had finished anything, or did not start."""
        self._failures.append(self._clock())

    def note_settled(self) -> None:
        """It lived long enough, or finished something: what was before does not count any more."""
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
        """The failures in words."""
        return f"failed {self.count} times in {self._config.crash_loop_window_s:g} s"


def shorten(reason: str) -> str:
    """The first line of a reason and its last ones, without passwords: what fits a table and a record."""
    lines = [line for line in redact(reason).splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES + 1:
        lines = [lines[0], *lines[-SHOWN_LINES:]]
    text = "\n".join(line[:400] for line in lines)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
