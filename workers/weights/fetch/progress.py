"""Track the progress of a fetch and the speed of peers."""

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.records.causes import WeightsFetched

#: A range is late after this time plus this multiple of the expected transfer time.
GRACE_S, TIMES = 2.0, 4.0
#: Number of recent ranges in the median rate, and the rate assumed before the first.
REMEMBERED, FIRST_BYTES_PER_S = 16, 64 * 1024**2


class Pace:
    """Measure the transfer rate of the peers of one object, in one fetch.

    Args:
        range_bytes: usual size of a range; ranges of less than half of it are not measured.
    """

    def __init__(self, range_bytes: int) -> None:
        self._range_bytes = range_bytes
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        #: Time of the first request since the last received range (monotonic, s); None: no request since.
        self._waits_since: float | None = None
        #: Whether any peer has sent a range.
        self.is_known = False
        #: Factor on the time before a slow peer is replaced; grows so that a transfer ends even if all peers are slow.
        self.patience = 1.0

    def asked(self, *, is_again: bool) -> None:
        """Record a request for a range; ``is_again``: it replaces a request to a slow peer."""
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
        """Return whether a range of this size, requested at ``since`` (monotonic, s), is late."""
        rate = median(self._rates) if self._rates else FIRST_BYTES_PER_S
        return time.monotonic() - since > patience * (GRACE_S + TIMES * num_bytes / rate)

    def is_idle(self) -> bool:
        """Return whether peers have sent nothing for longer than a range may take."""
        return self._waits_since is not None and self.is_late(self._range_bytes, self._waits_since)


@dataclass(slots=True)
class Progress:
    """Hold the progress of one fetch: written by the thread that fetches, read by any."""

    #: The version that is fetched, and the cause of the wait.
    cause: WeightsFetched = field(default_factory=lambda: WeightsFetched(0))
    #: Received bytes.
    num_bytes: int = 0

    def blocked_on(self, **fields: Any) -> None:
        """Set the cause of the wait, as fields of ``WeightsFetched``; no fields: not waiting."""
        self.cause = WeightsFetched(self.cause.version, **fields)
