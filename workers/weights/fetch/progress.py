"""How a fetch goes, for whoever waits for it."""

from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.causes import WeightsFetched


@dataclass(slots=True)
class Progress:
    """Of one fetch: written by the thread that fetches, read by any."""

    #: What is fetched, and what that waits for.
    cause: WeightsFetched = field(default_factory=lambda: WeightsFetched(0))
    #: Bytes that came.
    num_bytes: int = 0

    def blocked_on(self, **fields: Any) -> None:
        """Set what it waits for: fields of ``WeightsFetched``; none: nothing that has a name."""
        self.cause = WeightsFetched(self.cause.version, self.cause.is_copy, **fields)
