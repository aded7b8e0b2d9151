"""Marks: how a server that does not say which weights drew a token is brought to say it in its streams (T6)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import EngineError
from workers.sglang.stream import MARK

log = logging.getLogger(__name__)


class Marks:
    """The mark of the last change of weights. All methods belong to one event loop.

    Args:
        prove: draws a token that belongs to no sample.
        rename: gives the server's weights this name, and changes nothing else.
    """

    def __init__(self, prove: Callable[[], Awaitable[None]], rename: Callable[[str], Awaitable[Any]]) -> None:
        self._prove = prove
        self._rename = rename
        self._marking: asyncio.Task[None] | None = None
        #: True while the mark itself is on its way.
        self._is_marking = False

    async def begin(self, version: int) -> None:
        """Mark what is drawn from now on as of ``version``. Returns at once, but for an earlier mark on its way."""
        await self.end()
        self._marking = asyncio.create_task(self._mark(version), name=f"mark version {version}")

    async def _mark(self, version: int) -> None:
        """Have events say that tokens of weights before ``version`` are through (T6).

        A token that belongs to no sample is asked for after the server was told to continue. Answers leave the server
        in turn, so once it is there, nothing that was drawn before the change is still inside, a step in flight
        included. From then on the server names its weights with a mark, and what comes after a marked event was drawn
        under them. It needs no clock: whatever holds the stream back holds marks back too. Without one tokens stay
        with the older version.
        """
        try:
            await self._prove()
            self._is_marking = True
            await self._rename(f"{version}{MARK}")
        except EngineError as exc:
            log.info("tokens of running requests stay with the version before %d: %s", version, exc)
        finally:
            self._is_marking = False

    async def end(self) -> None:
        """No mark may arrive behind the next load: one that was sent is waited for, another one is given up."""
        marking, self._marking = self._marking, None
        if marking is None:
            return
        if not self._is_marking:
            marking.cancel()
        (ended,) = await asyncio.gather(marking, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("a mark failed; tokens of running requests stay with the version before", exc_info=ended)
