"""Publications as this machine can load them: with a folder that it sees, fetched where it does not."""

import asyncio
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import PublishError
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.waits import Waiting
from penstock.weights.index import read_index
from workers.weights.fetch.fetcher import Fetcher


class Nearby:
    """Fetches for one worker what it does not see, where ``serving.enabled`` says so.

    Raises:
        ConfigError: as ``Fetcher``.
    """

    def __init__(self, config: Config, keys: Keys, worker: str, waiting: Waiting) -> None:
        self._waiting = waiting
        self._fetcher = Fetcher(config, keys, worker) if config.serving.enabled else None

    async def of(self, publication: Publication) -> Publication:
        """The publication, with a path on this machine. Waits for all of it to be fetched.

        Raises:
            PublishError: as ``Fetcher.fetch``.
        """
        if self._fetcher is None or not publication.index or await asyncio.to_thread(_is_seen, publication):
            return publication
        self._waiting.for_(f"version {publication.version} of {publication.model} to be fetched over HTTP")
        path = await self._fetcher.fetch(publication.version, publication.index)
        self._waiting.end()
        return replace(publication, path=str(path))

    def close(self) -> None:
        """Fetch and serve no more. Blocks shortly."""
        if self._fetcher is not None:
            self._fetcher.close()


def _is_seen(publication: Publication) -> bool:
    """Whether the version is there: what an earlier run left on this machine under its path is another. Blocks."""
    try:
        read_index(Path(publication.path), publication.index)
    except PublishError:
        return False
    return True
