"""Publications that could not be loaded though they were to come before the newest one, or in its stead."""

import asyncio
import logging
from collections import Counter

from penstock.protocol.records.causes import VersionRetried
from penstock.protocol.records.publication import Publication
from penstock.protocol.waits import Waiting

log = logging.getLogger(__name__)

#: Tries before one is passed over, and the time between two: a disk may have a hiccup.
TRIES, RETRY_S = 3, 1.0


class Passed:
    """Of one engine; what is passed over is remembered until something is loaded."""

    def __init__(self, waiting: Waiting, *, is_tried_again: bool) -> None:
        self._waiting = waiting
        self._tries = TRIES if is_tried_again else 1
        self._failed: Counter[str] = Counter()

    @property
    def ids(self) -> set[str]:
        """Those that are passed over (VERSION-REV)."""
        return {one for one, failed in self._failed.items() if failed >= self._tries}

    def count(self, publication: Publication, why: Exception) -> bool:
        """Count a failure; whether it is to be tried again."""
        self._failed[publication.id] += 1
        is_passed = publication.id in self.ids
        if is_passed:
            log.info("version %d is passed over: %s", publication.version, why)
        return not is_passed

    async def after(self, publication: Publication, why: Exception) -> bool:
        """As ``count``; waits by name before the next try."""
        is_tried_again = self.count(publication, why)
        if is_tried_again:
            self._waiting.blocked_on(VersionRetried(publication.version, str(why)))
            await asyncio.sleep(RETRY_S)
            self._waiting.end()
        return is_tried_again

    def clear(self) -> None:
        """Something was loaded."""
        self._failed.clear()
