"""What holds samples and requests back while the weights of an engine change."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace

from penstock.protocol.records.causes import Cause, MemoryWanted, VersionDraining

#: Times for which a valve was closed that it remembers.
MAX_CLOSINGS = 256

_inside_sample: ContextVar[bool] = ContextVar("penstock_inside_sample", default=False)


class Valve:
    """Counts what is inside, and holds newcomers back while someone has it closed."""

    def __init__(self) -> None:
        #: How many are inside now.
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
        """Why newcomers wait, or None while it is open."""
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
        """Hold newcomers back inside the ``with``; those inside go on."""
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
        """When it was closed between two times (begin, end; Unix seconds), cut to these."""
        cut = ((max(begin, start_s), min(end, end_s)) for begin, end in self._closings)
        return [(begin, end) for begin, end in cut if begin < end]

    async def empty(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()


class Valves:
    """The valves before one engine, shut while its weights change.

    ``requests`` is passed by every single request for tokens, ``sample()`` is held around the whole making of a
    sample, turns and environment included. Policies ``in_place`` and ``abort`` close the first, ``drain`` the second.
    """

    def __init__(self) -> None:
        self.requests = Valve()
        self.samples = Valve()
        #: Held while weights are applied: one publication at a time.
        self.applying = asyncio.Lock()

    @asynccontextmanager
    async def sample(self) -> AsyncIterator[None]:
        """Waits while samples are drained; what is inside is drained before new weights load.

        May be held around more than one sample (a group, a cohort): tasks made inside pass freely, because a member
        that waited for the drain which waits for its group would wait for ever.
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
        """What newcomers wait for, or None."""
        cause = self.samples.cause
        if isinstance(cause, VersionDraining | MemoryWanted):
            return replace(cause, running=self.samples.running)
        return cause or self.requests.cause
