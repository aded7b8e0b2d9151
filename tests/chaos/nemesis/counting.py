"""Which faults count, and how long a run took to recover from each.

A fault counts where it found work in flight, and a batch had been committed since the one before: others hit a run that
was down already, and prove little. Recovery is the time from the strike to the next batch that is committed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault as it was."""

    number: int
    kind: str
    #: When (monotonic, seconds) it began, and was over.
    began: float
    ended: float
    #: Jobs that were leased when it began.
    in_flight: int
    #: Why nothing was done, or how it failed; '': it was done.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a fault was worth."""

    strike: Strike
    counts: bool
    #: Seconds to the next batch that was committed; None: there was none.
    recovery_s: float | None


def count(strikes: Sequence[Strike], commits: Sequence[float]) -> list[Counted]:
    """Judge faults in their order, by the times at which batches were committed (ascending)."""
    found: list[Counted] = []
    before = float("-inf")
    for strike in strikes:
        done = not strike.error
        worked = any(before < at <= strike.began for at in commits)
        after = next((at for at in commits if at > strike.began), None)
        recovery_s = None if after is None else after - strike.began
        found.append(Counted(strike, done and worked and strike.in_flight > 0, recovery_s))
        if done:
            before = strike.began
    return found


class Commits:
    """Notes when batches are committed, in a thread, until ``end``.

    Args:
        committed: how many so far; it may go back, where a rewind or a loss takes some away. None: nobody knows now.
    """

    def __init__(self, committed: Callable[[], int | None], look_s: float = 0.02) -> None:
        self._committed = committed
        self._look_s = look_s
        self._last: int | None = None
        self.times: list[float] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)

    def start(self) -> "Commits":
        """Begin; what was committed before counts as one now."""
        self._last = 0
        self._look()
        self._thread.start()
        return self

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        now = self._committed()
        if now is None:
            return
        if self._last is not None and now > self._last:
            with self._changed:
                self.times.append(time.monotonic())
                self._changed.notify_all()
        self._last = now

    def wait_for_one(self, since: float, timeout_s: float) -> bool:
        """Block until one was committed after ``since`` (monotonic); False when none was in ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.times) and self.times[-1] > since, timeout_s)
