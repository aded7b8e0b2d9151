"""Make publications loadable on this machine: use an accessible folder, or fetch it."""

import asyncio
from dataclasses import replace
from pathlib import Path

from penstock.errors import PublishError
from penstock.protocol.waits import Waiting
from penstock.records.causes import WeightsFetched
from penstock.records.publication import Publication
from penstock.weights.index import read_index
from penstock.workers.weights.fetch.fetcher import LOOK_S, Fetcher
from penstock.workers.weights.fetch.progress import Progress


class Nearby:
    """Fetch the versions whose folder one worker cannot access.

    Args:
        fetcher: None: fetch nothing.
    """

    def __init__(self, fetcher: Fetcher | None, waiting: Waiting) -> None:
        self._fetcher, self._waiting = fetcher, waiting

    async def of(self, publication: Publication) -> Publication:
        """Return the publication with a path on this machine. Waits until all of it is fetched.

        Raises:
            PublishError: as ``Fetcher.fetch``.
        """
        if self._fetcher is None or not publication.index or await asyncio.to_thread(_is_seen, publication):
            return publication
        progress = Progress(WeightsFetched(publication.version))
        coming = asyncio.ensure_future(self._fetcher.fetch(publication.version, publication.index, progress=progress))
        try:
            while not coming.done():
                self._waiting.blocked_on(progress.cause)
                await asyncio.wait([coming], timeout=LOOK_S)
        finally:
            coming.cancel()
        path = coming.result()
        self._waiting.end()
        return replace(publication, path=str(path))


def _is_seen(publication: Publication) -> bool:
    """Return whether the path has this version; an earlier run may have left another one there. Blocks."""
    try:
        read_index(Path(publication.path), publication.index)
    except PublishError:
        return False
    return True
