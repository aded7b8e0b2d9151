"""Block samples and requests while the weights of an engine change."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace

from penstock.records.cause import Cause
from penstock.records.worker_causes import MemoryWanted, VersionDraining

#: Number of past closed intervals that a valve records.
MAX_CLOSINGS = 256

_inside_sample: ContextVar[bool] = ContextVar("penstock_inside_sample", default=False)


class Valve:
    """Count running entrants, and block new ones while the valve is closed."""

    def __init__(self) -> None:
        #: Number of current entrants.
        self.running = 0
        self._holds: list[Cause] = []
        self._closed_s = 0.0
        self._closings: deque[tuple[float, float]] = deque(maxlen=MAX_CLOSINGS)
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def cause(self) -> Cause | None:
        """Cause for which new entrants wait; None while the valve is open."""
        return self._holds[0] if self._holds else None

    async def __aenter__(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self.running += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self.running -= 1
        if self.running == 0:
            self._empty.set()

    @contextmanager
    def held(self, cause: Cause) -> Iterator[None]:
        """Close the valve inside the ``with``: block new entrants, while current ones continue."""
        if not self._holds:
            self._closed_s = time.time()
        self._holds.append(cause)
        self._open.clear()
        try:
            yield
        finally:
            self._holds.remove(cause)
            if not self._holds:
                self._closings.append((self._closed_s, time.time()))
                self._open.set()

    def closed_within(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the closed intervals between two times (begin, end; Unix seconds), clipped to them."""
        cut = ((max(begin, start_s), min(end, end_s)) for begin, end in self._closings)
        return [(begin, end) for begin, end in cut if begin < end]

    async def empty(self) -> None:
        """Wait until the valve is empty."""
        await self._empty.wait()


class Valves:
    """Hold the two valves of an engine, which are closed while its weights change.

    Every generate request passes ``requests``; ``sample()`` encloses the generation of a sample with all its turns.
    Policies ``in_place`` and ``abort`` close ``requests``, policy ``drain`` closes ``samples``.
    """

    def __init__(self) -> None:
        self.requests = Valve()
        self.samples = Valve()
        #: Lock held while weights are applied, one publication at a time.
        self.applying = asyncio.Lock()

    @asynccontextmanager
    async def sample(self) -> AsyncIterator[None]:
        """Enter a sample: wait during a drain, which lets samples inside finish before new weights are loaded.

        May enclose several samples (a group, a cohort): tasks created inside enter freely, because a member that waits
        for the drain, which waits for its group, would deadlock.
        """
        if _inside_sample.get():
            yield
            return
        async with self.samples:
            token = _inside_sample.set(True)
            try:
                yield
            finally:
                _inside_sample.reset(token)

    @property
    def cause(self) -> Cause | None:
        """Cause for which new entrants wait, or None."""
        cause = self.samples.cause
        if isinstance(cause, VersionDraining | MemoryWanted):
            return replace(cause, running=self.samples.running)
        return cause or self.requests.cause
