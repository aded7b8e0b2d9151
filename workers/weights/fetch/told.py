"""What others know of one worker and one object, through Redis."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protocol.keys import Keys
from penstock.protocol.scripts import relay_have
from penstock.redis.control import AsyncControl


@dataclass(slots=True)
class Told:
    """What Redis knows of this worker and one object: said by ``say``, one word at a time."""

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
        """What is here by now, and which claim goes on. An older word must not come behind a newer one."""
        async with self._lock:
            await self.control.call(
                relay_have(self.keys, self.thing, self.worker, self.url, self.bitmap(), claim=self.claim)
            )
