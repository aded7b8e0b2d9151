"""The entries of one worker and one object in Redis, as other workers see them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protocol.keys import Keys
from penstock.protocol.scripts import relay_have
from penstock.redis.control import AsyncControl


@dataclass(slots=True)
class Told:
    """Announces what one worker has of one object by ``say``, one announcement at a time."""

    keys: Keys
    control: AsyncControl
    thing: str
    worker: str
    url: str
    bitmap: Callable[[], bytes]
    #: The range that it fetches from the trainer.
    claim: int = -1
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self) -> None:
        """Announce what is here by now, and which claim continues, in order."""
        async with self._lock:
            await self.control.call(
                relay_have(self.keys, self.thing, self.worker, self.url, self.bitmap(), claim=self.claim)
            )
