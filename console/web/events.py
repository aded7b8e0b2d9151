"""Streams of server-sent events, for pages that follow a run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from penstock.console.web.replies import to_json

#: Seconds between two events, and most streams at once: more would mean that a page leaks them.
EVERY_S = 1.0
MAX_STREAMS = 64


class Streams:
    """The open streams."""

    def __init__(self) -> None:
        self.num_open = 0

    def has_room(self) -> bool:
        return self.num_open < MAX_STREAMS

    async def follow(
        self, name: str, read: Callable[[], dict[str, Any]], every_s: float = EVERY_S
    ) -> AsyncIterator[bytes]:
        """Yield an event ``name`` with the result of ``read`` whenever that has changed, else a comment; endless.

        Args:
            read: blocks; called in a thread.
        """
        self.num_open += 1
        before = b""
        try:
            while True:
                now = to_json(await run_in_threadpool(read))
                yield b": as before\n\n" if now == before else b"event: %b\ndata: %b\n\n" % (name.encode(), now)
                before = now
                await asyncio.sleep(every_s)
        finally:
            self.num_open -= 1
