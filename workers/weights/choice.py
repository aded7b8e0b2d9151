"""Select the publication that an engine is to load next, which may be another one than the newest."""

import asyncio
import logging
from collections import Counter

from penstock.config.staleness import Mode
from penstock.errors import PublishError
from penstock.protocol.waits import Waiting
from penstock.records.causes import VersionRetried
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl
from penstock.workers.services import Services
from penstock.workers.weights.ends import Ends
from penstock.workers.weights.folders import Folders, publications_in

log = logging.getLogger(__name__)

#: Attempts before a publication is skipped, and the pause between two: disk errors may be transient.
TRIES, RETRY_S = 3, 1.0


class Passed:
    """Count failed loads of publications due before, or instead of, the newest; skip them until another load succeeds.

    One instance per engine.
    """

    def __init__(self, waiting: Waiting, *, is_tried_again: bool) -> None:
        self._waiting = waiting
        self._tries = TRIES if is_tried_again else 1
        self._failed: Counter[str] = Counter()

    @property
    def ids(self) -> set[str]:
        """Publications to skip (VERSION-REV)."""
        return {one for one, failed in self._failed.items() if failed >= self._tries}

    def count(self, publication: Publication, why: Exception) -> bool:
        """Count a failure; return whether to retry."""
        self._failed[publication.id] += 1
        is_passed = publication.id in self.ids
        if is_passed:
            log.info("version %d is passed over: %s", publication.version, why)
        return not is_passed

    async def after(self, publication: Publication, why: Exception) -> bool:
        """Count a failure; before a retry, wait and report the wait. Return whether to retry."""
        is_tried_again = self.count(publication, why)
        if is_tried_again:
            cause = why.cause if isinstance(why, PublishError) else None
            self._waiting.blocked_on(cause or VersionRetried(publication.version, str(why)))
            await asyncio.sleep(RETRY_S)
            self._waiting.end()
        return is_tried_again

    def clear(self) -> None:
        """Reset after a load."""
        self._failed.clear()


#: Number of recent publications searched for one that loads.
KEPT = 16


class Choice:
    """Select publications for one engine.

    Args:
        reader: a connection of its own.
    """

    def __init__(
        self, services: Services, reader: AsyncControl, folders: Folders, ends: Ends, waiting: Waiting
    ) -> None:
        self._services, self._reader, self._folders, self._ends = services, reader, folders, ends
        #: VERSION-REV of publications on which engines crashed before producing output -> last error.
        self.aside: dict[str, str] = {}
        #: Publications that failed to load before, or instead of, the newest.
        self.passed = Passed(waiting, is_tried_again=services.config.staleness.rules.drains)

    @property
    def out(self) -> set[str]:
        """Publications to skip (VERSION-REV)."""
        return self.aside.keys() | self.passed.ids

    async def first(self, newest: Publication, had: int = -1) -> Publication | None:
        """See ``Ends.first``."""
        return await self._ends.first(newest, self.out, had)

    async def now(self, newest: Publication) -> Publication | None:
        """Return the publication that can be loaded from a folder now; None if its folder is still missing.

        Raises:
            PublishError: the record of the newest one's folder is malformed.
        """
        return await self.first(newest) or await self._folders.now(newest)

    async def in_time(self, newest: Publication, *, in_its_stead: bool = True) -> Publication:
        """Return the publication to load; wait for its folder, and report the wait.

        Args:
            in_its_stead: allow the latest version within the bound while the newest has no folder.

        Raises:
            PublishError: another publication was announced meanwhile.
        """

        async def earlier() -> Publication | None:
            if (found := await self.first(newest)) is not None or not in_its_stead:
                return found
            return await self._folders.before(newest, engine.version, fits)

        def fits(one: Publication) -> bool:
            return self._is_near(one, newest) and not newest.abandons(one.version) and one.id not in self.out

        engine = self._services.engine
        found = await self._folders.of_or_before(newest, earlier)
        return await self.first(found) or found

    async def to_start_with(self, newest: Publication | None, loaded: Publication | None) -> list[Publication]:
        """Return the publications an engine may start with, best first.

        These are the version of the oldest cohort (one_step), the newest, the one the engine had, and earlier ones. All
        have folders and are not abandoned; one that replaces a newest without a folder is within the bound; none has to
        wait for a cohort that another engine generates.

        Args:
            loaded: publication the engine had.
        """
        if newest is None:
            return []
        first = await self.first(newest, -1 if loaded is None else loaded.version)
        fetched = None
        if loaded is not None and loaded.id == newest.id:
            fetched, loaded = loaded if loaded.is_whole else None, None  # fetched from its trainer's copy
        whole, aside = await self._folders.there(newest) or fetched, newest.id in self.aside
        earlier: list[Publication] = [] if loaded is None else [loaded]
        if aside or whole is None:
            entries = await self._reader.do(lambda client: client.xrevrange(self._key, count=KEPT))
            earlier += publications_in(entries)
        earlier = [one for one in earlier if not newest.abandons(one.version) and one.id != newest.id]
        if whole is None and not aside:
            earlier = [one for one in earlier if self._is_near(one, newest)]
        found = [whole, *[await self._folders.there(one) for one in earlier if one.id not in self.aside]]
        good = [one for one in found if one is not None and one.id not in self.aside]
        if first is not None:
            good = [first, *(one for one in good if one.id != first.id)]
        return [one for one in good if not await self._ends.is_held_up(one, newest, self.out)]

    @property
    def _key(self) -> str:
        return self._services.keys.weights(self._services.config.model.name)

    def _is_near(self, one: Publication, newest: Publication) -> bool:
        """Return whether the bound allows ``one`` instead of a newest without a folder."""
        staleness = self._services.config.staleness
        return 0 < newest.version - one.version <= (staleness.bound if staleness.mode is Mode.ASYNC else 0)
