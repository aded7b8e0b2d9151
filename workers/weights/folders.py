"""Folders of publications that were announced before their folders were there (docs/protocol.md, The send first)."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from penstock.errors import EngineDied, ProtocolError, PublishError
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.scripts import read_whole_async
from penstock.protocol.waits import Waiting
from penstock.redis.control import AsyncControl

#: How often a folder that is to come is looked for.
LOOK_S = 0.1
#: How often an earlier one is looked for meanwhile, and among how many.
EARLIER_S, BETWEEN = 0.5, 16


class FolderToCome(PublishError):
    """A publication was not sent to this engine, which has what it had, and its folder is not there yet."""


class Folders:
    """What one worker knows of folders.

    Args:
        newest: reads the newest publication.
    """

    def __init__(
        self,
        keys: Keys,
        control: AsyncControl,
        waiting: Waiting,
        newest: Callable[[], Awaitable[Publication | None]],
    ) -> None:
        self._keys, self._control, self._waiting, self._newest = keys, control, waiting, newest
        #: Version whose folder is waited for, by an engine that can take the next one that is sent; -1: none.
        self.awaits = -1

    async def now(self, publication: Publication) -> Publication | None:
        """The publication with its folder; None: that is still to come. Blocks for a round trip at most."""
        if publication.is_whole:
            return publication
        return await self._control.do(lambda client: read_whole_async(client, self._keys, publication))

    async def of(self, publication: Publication) -> Publication:
        """The publication with its folder; waits for it, by name.

        Raises:
            PublishError: another one was announced meanwhile.
        """
        return await self.of_or_before(publication, publication.version, lambda one: False)

    async def of_or_before(
        self, publication: Publication, above: int, fits: Callable[[Publication], bool]
    ) -> Publication:
        """As ``of``, or an earlier one that is whole first: the disk may be slower than a step for as long as it likes.

        Args:
            above: only versions above this one.
            fits: whether an earlier one will do.
        """
        self.awaits, look_at = publication.version, 0.0
        try:
            while (found := await self.now(publication)) is None:
                newest = await self._newest()
                if newest is not None and newest.id != publication.id:
                    what = f"version {publication.version} has no folder"
                    raise PublishError(f"{what}, and {newest.version} is announced.")
                self._wait_for(publication)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + EARLIER_S
                    if (found := await self._before(publication, above, fits)) is not None:
                        break
                await asyncio.sleep(LOOK_S)
        finally:
            self.awaits = -1
        self._waiting.end()
        return found

    async def _before(
        self, publication: Publication, above: int, fits: Callable[[Publication], bool]
    ) -> Publication | None:
        """The latest one between that is whole, and will do."""
        if publication.version - above <= 1:
            return None
        key, first, last = self._keys.weights(publication.model), str(above + 1), f"({publication.version}-0"
        entries = await self._control.do(lambda client: client.xrevrange(key, last, first, count=BETWEEN))
        for _, fields in entries:
            try:
                one = Publication.from_bytes(fields.get(b"p", b""), "publication")
            except ProtocolError:
                continue  # it was said when it was the newest
            if fits(one) and (found := await self.now(one)) is not None:
                return found
        return None

    async def of_this_or_later(self, publication: Publication, limit_s: float) -> Publication:
        """For an engine whose weights are partly new: the publication, or a later one, with its folder.

        Raises:
            EngineDied: none is there in ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while True:
            newest = await self._newest()
            for one in (newest, publication):  # the newest may abandon the other
                if one is not None and one.version >= publication.version and (found := await self.now(one)):
                    self._waiting.end()
                    return found
            if time.monotonic() > deadline:
                raise EngineDied(
                    f"the engine's weights are mixed, as version {publication.version} was sent in part, and no "
                    f"folder came in {limit_s:g} s; restart it."
                )
            self._wait_for(publication)
            await asyncio.sleep(LOOK_S)

    def _wait_for(self, publication: Publication) -> None:
        self._waiting.for_(f"the folder of version {publication.version} of {publication.model} to be written")
