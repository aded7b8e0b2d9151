"""How fast the recorder works: as it can while cores are free, and little where others wait for them."""

import time
from collections.abc import Callable
from pathlib import Path

#: Where others wait for cores: at most so much of one is taken, while no more of the backlog than this is full.
SHARE, FULL = 0.05, 0.75
#: Cores are wanted by others where it waited for one for more than this share of the time that it could have run.
CONTENDED = 0.1
#: Longest rest, in seconds.
MAX_REST_S = 5.0

#: CPU seconds so far of this thread, and seconds in which it could have run and had no core.
Ran = Callable[[], tuple[float, float]]


def ran() -> tuple[float, float]:
    """By the kernel's account of the calling thread; that it never waited where there is none (no Linux)."""
    try:
        cpu_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.process_time(), 0.0
    return int(cpu_ns) / 1e9, int(waited_ns) / 1e9


class Pace:
    """Says how long to rest after some work, so that a burst of groups is recorded when it is over.

    Args:
        ran: what the kernel says of this thread.
    """

    def __init__(self, ran: Ran = ran) -> None:
        self._ran = ran
        self._last = ran()

    def rest_s(self) -> float:
        """Seconds to rest after the work since the last call, where nobody needs room; 0: go on. Returns at once."""
        before, self._last = self._last, self._ran()
        cpu_s, waited_s = (now - then for now, then in zip(self._last, before, strict=True))
        if waited_s <= CONTENDED * (cpu_s + waited_s):
            return 0.0
        return max(0.0, min(MAX_REST_S, cpu_s * (1 / SHARE - 1)))
