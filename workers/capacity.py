"""Measure the capacity of a worker: its token rate while all its slots are taken, whatever the demand of trainers."""

#: Half-life of a measurement, in seconds with full slots.
HALF_S = 120.0
#: The rate is unknown below this many seconds with full slots.
LEAST_S = 10.0


class Capacity:
    """Tokens per second with full slots, over the last minutes in which they were full.

    A rate over all time would be the one the gate allows: a fleet that divides its trainers' demand by it would grow
    without end.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        #: Seconds with full slots so far, up to ``LEAST_S``.
        self._known_s = 0.0

    def add(self, seconds: float, tokens: float, *, full: bool) -> None:
        """Add a measurement: ``tokens`` in the last ``seconds``; ``full``: no slot was free at any time in it."""
        if not full or seconds <= 0:
            return
        kept = 0.5 ** (seconds / HALF_S)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._known_s = min(LEAST_S, self._known_s + seconds)

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 while it is unknown."""
        return self._tokens / self._seconds if self._known_s >= LEAST_S else 0.0
