"""What a worker can draw: its rate while all of its slots are taken, which is no longer what trainers ask of it."""

#: A look counts half as much when the slots were full for so long since.
HALF_S = 120.0
#: Below so many seconds with full slots it is not known yet.
LEAST_S = 10.0


class Capacity:
    """Tokens per second with full slots, over the last minutes in which they were full.

    A rate over all of the time would be what the gate lets through: a fleet that divides its trainers' demand by that
    wants to be larger than it is, however large it is.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        #: Seconds with full slots so far, up to ``LEAST_S``.
        self._known_s = 0.0

    def add(self, seconds: float, tokens: float, *, full: bool) -> None:
        """Take a look: ``tokens`` were drawn in the last ``seconds``; ``full``: in all of which no slot was free."""
        if not full or seconds <= 0:
            return
        kept = 0.5 ** (seconds / HALF_S)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._known_s = min(LEAST_S, self._known_s + seconds)

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 while it is not known."""
        return self._tokens / self._seconds if self._known_s >= LEAST_S else 0.0
