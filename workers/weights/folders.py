"""Folders of publications that were announced before their folders existed (docs/protocol.md, The send first)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from penstock.errors import EngineDied, ProtocolError, PublishError
from penstock.protocol.scripts import read_copied, read_whole_async
from penstock.protocol.waits import Waiting
from penstock.records.causes import WeightsFetched, WeightsUnwritten
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl
from penstock.workers.weights.fetch.progress import Progress

log = logging.getLogger(__name__)

#: Pause after a fetch that failed.
AGAIN_S = 1.0

#: Returns the publication with the index of its trainer's copy; None: no copy was announced.
LookUp = Callable[[Publication], Awaitable[Publication | None]]
#: Fetches that copy and returns the publication with a local folder; reports progress. Raises PublishError.
Fetch = Callable[[Publication, Progress], Awaitable[Publication]]


class Early:
    """Prefetch a trainer's copy in the background, while the caller polls for the folder.

    Args:
        fetch: None: fetch nothing.
    """

    def __init__(self, look_up: LookUp, fetch: Fetch | None) -> None:
        self._look_up, self._fetch = look_up, fetch
        self._task: asyncio.Task[Publication] | None = None
        #: The publication that is fetched, or was tried last.
        self._of: Publication | None = None
        #: Progress of the current attempt.
        self.progress = Progress()
        self._again_at = 0.0
        #: Error of its last attempt; '' for none.
        self._error = ""

    @property
    def of(self) -> Publication | None:
        """The publication being fetched."""
        return self._of if self._task is not None else None

    @property
    def comes(self) -> bool:
        """Return whether a fetch runs that has not failed before, or receives bytes; it ends by itself if it stalls."""
        return self._task is not None and (not self._error or self.progress.num_bytes > 0)

    async def got(self, publication: Publication) -> Publication | None:
        """Return the publication with a verified folder on this machine; None: not yet.

        Blocks for a round trip, and until a fetch of another publication has ended.
        """
        if self._fetch is None:
            return None
        if self._of is None or self._of.id != publication.id:
            await self.end()
            self._of = publication
        try:
            await self._begin(publication, self._fetch)
            if self._task is None or not self._task.done():
                return None
            task, self._task = self._task, None
            return task.result()
        except (PublishError, ProtocolError) as exc:
            self._again_at = time.monotonic() + AGAIN_S
            if str(exc) != self._error:
                log.warning("failed to fetch the trainer's copy of version %d: %s", publication.version, exc)
            self._error = str(exc)
            return None

    async def _begin(self, publication: Publication, fetch: Fetch) -> None:
        if self._task is not None or time.monotonic() < self._again_at:
            return
        if (copied := await self._look_up(publication)) is not None:
            self.progress = Progress(WeightsFetched(publication.version, is_copy=True))
            self._task = asyncio.ensure_future(fetch(copied, self.progress))

    async def end(self) -> None:
        """Stop fetching; fetched bytes are kept for a later fetch."""
        task, self._task, self._of = self._task, None, None
        self._again_at, self._error = 0.0, ""
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


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
        fetch: fetches a trainer's copy; None: no copies are fetched.
    """

    def __init__(
        self,
        keys: Keys,
        control: AsyncControl,
        waiting: Waiting,
        newest: Callable[[], Awaitable[Publication | None]],
        fetch: Fetch | None = None,
    ) -> None:
        self._keys, self._control, self._waiting, self.newest = keys, control, waiting, newest
        self._fetch = fetch
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
        """Return the publication with its folder, or one fetched from its trainer's copy; wait, and report the wait.

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
        self.awaits, look_at, early = publication.version, 0.0, Early(self._copied, self._fetch)
        try:
            while (found := await self.now(publication)) is None:
                newest = await self.newest()
                if newest is not None and newest.id != publication.id:
                    what = f"version {publication.version} has no folder"
                    raise PublishError(f"{what}, and {newest.version} is announced.")
                if (found := await early.got(publication)) is not None:
                    break
                self._wait_for(publication, early)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + EARLIER_S
                    if (found := await earlier()) is not None:
                        break
                await asyncio.sleep(LOOK_S)
        finally:
            self.awaits = -1
            await early.end()
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
            EngineDied: no folder or copy was found within ``limit_s`` seconds, and none is being fetched.
        """
        deadline, early = time.monotonic() + limit_s, Early(self._copied, self._fetch)
        try:
            while (found := await self._this_or_later(publication, early)) is None:
                if time.monotonic() > deadline and not early.comes:
                    raise EngineDied(
                        f"the engine's weights are mixed (version {publication.version} was sent in part), and no "
                        f"folder was found in {limit_s:g} s; restart it."
                    )
                self._wait_for(early.of or publication, early)
                await asyncio.sleep(LOOK_S)
        finally:
            await early.end()
        self._waiting.end()
        return found

    async def _this_or_later(self, publication: Publication, early: Early) -> Publication | None:
        newest = await self.newest()
        for one in (newest, publication):  # the newest may abandon the other
            if one is not None and one.version >= publication.version and (found := await self.now(one)):
                return found
        return await early.got(newest if newest is not None else publication)

    async def _copied(self, publication: Publication) -> Publication | None:
        return await self._control.do(lambda client: read_copied(client, self._keys, publication))

    def _wait_for(self, publication: Publication, early: Early) -> None:
        unwritten = WeightsUnwritten(publication.version)
        self._waiting.blocked_on(unwritten if early.of is None else early.progress.cause)


async def _none() -> None:
    """Return no earlier publication."""


def publications_in(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Publication]:
    """Return the publications of a stream; a malformed one is skipped, with a log entry while it is the newest."""
    found = []
    for _, fields in entries:
        with suppress(ProtocolError):
            found.append(Publication.from_bytes(fields.get(b"p", b""), "publication"))
    return found
