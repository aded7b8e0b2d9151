"""Folders of publications that were announced before their folders existed (docs/protocol.md, The send first)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from penstock.errors import EngineDied, ProtocolError, PublishError
from penstock.protocol.scripts import read_whole_async
from penstock.protocol.waits import Waiting
from penstock.records.causes import WeightsUnwritten
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl

#: Polling interval for a missing folder.
LOOK_S = 0.1
#: Polling interval for an earlier publication meanwhile, and how many are searched.
EARLIER_S, BETWEEN = 0.5, 16


class FolderToCome(PublishError):
    """A publication was not sent to this engine, which is unchanged, and its folder does not exist yet."""


class Folders:
    """Find the folders of publications for one worker.

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
        self._keys, self._control, self._waiting, self.newest = keys, control, waiting, newest
        #: Version whose folder the engine waits for, while it could receive the next one sent; -1: none.
        self.awaits = -1

    async def now(self, publication: Publication) -> Publication | None:
        """Return the publication with its folder; None if it is still missing. Blocks for at most one round trip.

        Raises:
            PublishError: the record of its folder is malformed.
        """
        if publication.is_whole:
            return publication
        try:
            return await self._control.do(lambda client: read_whole_async(client, self._keys, publication))
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc

    async def there(self, publication: Publication) -> Publication | None:
        """Return the publication with its folder; None if it is missing or its record is malformed."""
        try:
            return await self.now(publication)
        except PublishError:
            return None

    async def of(self, publication: Publication) -> Publication:
        """Return the publication with its folder; wait, and report the wait.

        Raises:
            PublishError: another publication was announced meanwhile.
        """
        return await self.of_or_before(publication, _none)

    async def of_or_before(
        self, publication: Publication, earlier: Callable[[], Awaitable[Publication | None]]
    ) -> Publication:
        """Return the publication as ``of`` does, or an earlier one if its folder is found first.

        Args:
            earlier: searches for a suitable earlier publication.
        """
        self.awaits, look_at = publication.version, 0.0
        try:
            while (found := await self.now(publication)) is None:
                newest = await self.newest()
                if newest is not None and newest.id != publication.id:
                    what = f"version {publication.version} has no folder"
                    raise PublishError(f"{what}, and {newest.version} is announced.")
                self._waiting.blocked_on(WeightsUnwritten(publication.version))
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + EARLIER_S
                    if (found := await earlier()) is not None:
                        break
                await asyncio.sleep(LOOK_S)
        finally:
            self.awaits = -1
        self._waiting.end()
        return found

    async def before(
        self, publication: Publication, above: int, fits: Callable[[Publication], bool]
    ) -> Publication | None:
        """Return the latest complete one before ``publication`` and above version ``above`` that fits."""
        if publication.version - above <= 1:
            return None
        key, first, last = self._keys.weights(publication.model), str(above + 1), f"({publication.version}-0"
        entries = await self._control.do(lambda client: client.xrevrange(key, last, first, count=BETWEEN))
        for one in publications_in(entries):
            if fits(one) and (found := await self.there(one)) is not None:
                return found
        return None

    async def earliest(self, first: int, before: Publication, out: Collection[str]) -> Publication | None:
        """Return the earliest complete version that is not abandoned, from ``first`` on and before another; or None.

        Args:
            out: publications to skip (VERSION-REV).
        """
        key, end = self._keys.weights(before.model), f"({before.version}-0"
        entries = await self._control.do(lambda client: client.xrevrange(key, end, str(first), count=BETWEEN))
        for one in reversed(publications_in(entries)):
            if one.id in out or before.abandons(one.version):
                continue
            if (found := await self.there(one)) is not None:
                return found
        return None

    async def of_this_or_later(self, publication: Publication, limit_s: float) -> Publication:
        """Return the publication or a later one, with a folder, for an engine with partly updated weights.

        Raises:
            EngineDied: no folder was found within ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while (found := await self._this_or_later(publication)) is None:
            if time.monotonic() > deadline:
                raise EngineDied(
                    f"the engine's weights are mixed (version {publication.version} was sent in part), and no "
                    f"folder was found in {limit_s:g} s; restart it."
                )
            self._waiting.blocked_on(WeightsUnwritten(publication.version))
            await asyncio.sleep(LOOK_S)
        self._waiting.end()
        return found

    async def _this_or_later(self, publication: Publication) -> Publication | None:
        newest = await self.newest()
        for one in (newest, publication):  # the newest may abandon the other
            if one is not None and one.version >= publication.version and (found := await self.now(one)):
                return found
        return None


async def _none() -> None:
    """Return no earlier publication."""


def publications_in(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Publication]:
    """Return the publications of a stream; a malformed one is skipped, with a log entry while it is the newest."""
    found = []
    for _, fields in entries:
        with suppress(ProtocolError):
            found.append(Publication.from_bytes(fields.get(b"p", b""), "publication"))
    return found
