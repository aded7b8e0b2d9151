"""Show the progress of long operations on stderr: a line that changes on a terminal, plain lines in a pipe.

Nothing is shown for short operations, or with ``--json``.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from penstock.console.terminal import Terminal, duration
from penstock.text import printable

#: Seconds before the first line in a pipe; between two lines; between two equal lines.
LINE_EVERY_S = 5.0
SAME_EVERY_S = 30.0


class Steps:
    """A context manager around the work; ``at`` reports progress.

    Args:
        what: name of the work.
        total: number of steps; None: unknown, so no ETA.
        hidden: show nothing.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        hidden: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total = printable(what), total
        self._console = console or Terminal(stderr=True)
        self._clock = clock
        self._began = self._said_at = clock()
        self._said: tuple[int, str] | None = None
        self._hidden = hidden
        is_shown = self._console.is_terminal and not hidden
        self._status = Status(Text(self._what), console=self._console) if is_shown else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def at(self, done: int, words: str = "", *, total: int | None = None) -> None:
        """Report the number of finished steps; ``words`` names the current one. Returns at once.

        Args:
            total: number of steps, if it became known only now.
        """
        self._total = self._total if total is None else total
        if self._status is not None:
            self._status.update(Text(self.line(done, words)))
        elif not self._hidden and self._clock() - self._said_at >= self._pause_s(done, words):
            self._said_at, self._said = self._clock(), (done, words)
            self._console.print(self.line(done, words), markup=False, highlight=False, soft_wrap=True)

    def _pause_s(self, done: int, words: str) -> float:
        return SAME_EVERY_S if (done, words) == self._said else LINE_EVERY_S

    def line(self, done: int, words: str = "") -> str:
        """Return the line for a pipe."""
        took_s = self._clock() - self._began
        counted = f" {done}" if self._total is None else f" {done} of {self._total}"
        left = f", about {duration(took_s * (self._total - done) / done)} left" if done and self._total else ""
        counted = counted if self._total is not None or done else ""
        return printable(f"{self._what}:{counted}{words and f' {words}'} ({took_s:.0f} s{left})")
