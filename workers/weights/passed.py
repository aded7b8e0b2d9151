"""Versions to skip: publications that failed to load although they were due before, or instead of, the newest one."""

import asyncio
import logging
from collections import Counter

from penstock.errors import PublishError
from penstock.protocol.records.causes import VersionRetried
from penstock.protocol.records.publication import Publication
from penstock.protocol.waits import Waiting

log = logging.getLogger(__name__)

#: Tries before one is passed over, and the time between two: a disk may have a hiccup.
TRIES, RETRY_S = 3, 1.0


class Passed:
    """The versions one engine skips, until something is loaded."""

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
        """Do the same as ``count``; wait before a retry, and report the wait."""
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
