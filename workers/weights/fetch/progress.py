"""Progress of a fetch, for processes that wait for it."""

from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.causes import WeightsFetched


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
