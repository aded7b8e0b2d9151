"""Progress of a fetch, for processes that wait for it."""

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.records.causes import WeightsFetched

#: What any range may take beside its bytes, and how many times as long as one took of late.
GRACE_S, TIMES = 2.0, 4.0
#: Ranges that are remembered, and what is taken for their pace before there is any.
REMEMBERED, FIRST_BYTES_PER_S = 16, 64 * 1024**2


class Pace:
    """Response times of the peers of one object, in one fetch.

    Args:
        range_bytes: of most ranges; those of less than half of it say nothing of how fast a peer is.
    """

    def __init__(self, range_bytes: int) -> None:
        self._range_bytes = range_bytes
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        #: Since when peers are asked, and have given nothing; None: they gave something.
        self._waits_since: float | None = None
        #: Whether a peer gave anything by now.
        self.is_known = False
        #: How much longer a peer is waited for before another is asked: where all became slow, one must come to an end.
        self.patience = 1.0

    def asked(self, *, is_again: bool) -> None:
        """Record a request for a range; ``is_again``: because another peer gives it too slowly."""
        if is_again:
            self.patience *= 2
        if self._waits_since is None:
            self._waits_since = time.monotonic()

    def came(self, num_bytes: int, took_s: float) -> None:
        """Record a received range."""
        self.is_known, self._waits_since, self.patience = True, None, 1.0
        if num_bytes >= self._range_bytes / 2:
            self._rates.append(num_bytes / max(took_s, 1e-6))

    def is_late(self, num_bytes: int, since: float, patience: float = 1.0) -> bool:
        """Return whether a range of this size requested at ``since`` (monotonic, in s) is late."""
        rate = median(self._rates) if self._rates else FIRST_BYTES_PER_S
        return time.monotonic() - since > patience * (GRACE_S + TIMES * num_bytes / rate)

    def is_idle(self) -> bool:
        """Return whether peers have given nothing for as long as a range may take."""
        return self._waits_since is not None and self.is_late(self._range_bytes, self._waits_since)


@dataclass(slots=True)
class Progress:
    """Progress of one fetch: written by the thread that fetches, read by any."""

    #: What is fetched, and what that waits for.
    cause: WeightsFetched = field(default_factory=lambda: WeightsFetched(0))
    #: Bytes that came.
    num_bytes: int = 0

    def blocked_on(self, **fields: Any) -> None:
        """Set the cause of its wait, as fields of ``WeightsFetched``; none: no cause."""
        self.cause = WeightsFetched(self.cause.version, self.cause.is_copy, **fields)
