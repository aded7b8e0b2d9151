"""Limit the recorder's speed: unlimited while cores are free, slow if other processes need them."""

import time
from collections.abc import Callable
from pathlib import Path

#: Share of a core to use if cores are contended, while the backlog is no fuller than ``FULL``.
SHARE, FULL = 0.05, 0.75
#: Cores are contended if this thread waited for one for more than this share of its runnable time.
CONTENDED = 0.1
#: Longest rest, in seconds.
MAX_REST_S = 5.0

#: CPU seconds of this thread so far, and seconds in which it was runnable without a core.
Ran = Callable[[], tuple[float, float]]


def ran() -> tuple[float, float]:
    """Return the kernel's account of the calling thread; without waiting times on other systems than Linux."""
    try:
        cpu_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.process_time(), 0.0
    return int(cpu_ns) / 1e9, int(waited_ns) / 1e9


class Pace:
    """Computes how long to rest after some work, so that a burst of groups is recorded after it is over.

    Args:
        ran: the kernel's account of this thread.
    """

    def __init__(self, ran: Ran = ran) -> None:
        self._ran = ran
        self._last = ran()

    def rest_s(self) -> float:
        """Return seconds to rest after the work since the last call; 0: continue. Returns at once."""
        before, self._last = self._last, self._ran()
        cpu_s, waited_s = (now - then for now, then in zip(self._last, before, strict=True))
        if waited_s <= CONTENDED * (cpu_s + waited_s):
            return 0.0
        return max(0.0, min(MAX_REST_S, cpu_s * (1 / SHARE - 1)))
