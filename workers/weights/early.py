"""Fetch the trainer's copy of a version before the folder of that version exists (docs/protocol.md)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.errors import ProtocolError, PublishError
from penstock.protocol.records.causes import WeightsFetched
from penstock.protocol.records.publication import Publication
from penstock.workers.weights.fetch.progress import Progress

log = logging.getLogger(__name__)

#: Pause after a fetch that failed.
AGAIN_S = 1.0

#: A publication with the index of its trainer's copy; None: none is told of.
LookUp = Callable[[Publication], Awaitable[Publication | None]]
#: That one with a folder on this machine; waits for it, and shows how it goes. Raises PublishError.
Fetch = Callable[[Publication, Progress], Awaitable[Publication]]


class Early:
    """One such fetch at a time, beside whoever also looks for the folder: begun, looked at and ended by it.

    Args:
        fetch: None: nothing is fetched.
    """

    def __init__(self, look_up: LookUp, fetch: Fetch | None) -> None:
        self._look_up, self._fetch = look_up, fetch
        self._task: asyncio.Task[Publication] | None = None
        #: What is fetched, or was tried last.
        self._of: Publication | None = None
        #: How the present try goes.
        self.progress = Progress()
        self._again_at = 0.0
        #: How the last try of it failed; '' for none.
        self._said = ""

    @property
    def of(self) -> Publication | None:
        """The publication being fetched."""
        return self._of if self._task is not None else None

    @property
    def comes(self) -> bool:
        """Whether one is on its way, with bytes where it failed before: it ends by itself where none come."""
        return self._task is not None and (not self._said or self.progress.num_bytes > 0)

    async def got(self, publication: Publication) -> Publication | None:
        """Return the publication with a proven folder on this machine; None: not yet.

        Blocks for a round trip, and for the end of a fetch of another publication.
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
            if str(exc) != self._said:
                log.warning("the trainer's copy of version %d does not come: %s", publication.version, exc)
            self._said = str(exc)
            return None

    async def _begin(self, publication: Publication, fetch: Fetch) -> None:
        if self._task is not None or time.monotonic() < self._again_at:
            return
        if (copied := await self._look_up(publication)) is not None:
            self.progress = Progress(WeightsFetched(publication.version, is_copy=True))
            self._task = asyncio.ensure_future(fetch(copied, self.progress))

    async def end(self) -> None:
        """Stop fetching; fetched bytes stay for a later fetch."""
        task, self._task, self._of = self._task, None, None
        self._again_at, self._said = 0.0, ""
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
