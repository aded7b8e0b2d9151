"""A bound on bytes a second."""

import asyncio
import time

#: Of how much at once may go after a rest, in seconds of the rate.
BURST_S = 0.1


class Rate:
    """A token bucket: ``await take(n)`` returns when ``n`` more bytes may be sent. For one event loop.

    Args:
        bytes_per_s: None: no bound.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._per_s = bytes_per_s
        #: When the bucket is as full as it was before all that was taken.
        self._free_at = 0.0
        self._turn = asyncio.Lock()

    async def take(self, num_bytes: int) -> None:
        """Waits in turn: who asked first goes first. Who goes away meanwhile has taken nothing."""
        if self._per_s is None:
            return
        async with self._turn:
            now = time.monotonic()
            free_at = max(self._free_at, now - BURST_S) + num_bytes / self._per_s
            if free_at > now:
                await asyncio.sleep(free_at - now)
            self._free_at = free_at
