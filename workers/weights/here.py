"""A version's folder on this machine: a copy made from deltas, one fetched over HTTP, or the trainer's own."""

from dataclasses import replace

from penstock.config import Config
from penstock.errors import PublishError
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.waits import Waiting
from penstock.workers.services import Tally
from penstock.workers.weights.copies import Copies
from penstock.workers.weights.fetch.fetcher import Fetcher
from penstock.workers.weights.fetch.nearby import Nearby
from penstock.workers.weights.fetch.progress import Progress


class Here:
    """The folders of one worker. Raises ConfigError as ``Fetcher``."""

    def __init__(self, config: Config, keys: Keys, worker: str, waiting: Waiting, tally: Tally) -> None:
        self._fetcher = Fetcher(config, keys, worker) if config.serving.enabled else None
        self._copies = Copies(config, waiting, tally, self._fetcher)
        self._nearby = Nearby(self._fetcher, waiting)

    async def of(self, publication: Publication) -> Publication:
        """Return the publication with a path on this machine. Waits for the folder; the engine keeps running.

        Raises PublishError where it cannot be made or fetched.
        """
        return await self._nearby.of(await self._copies.of(publication))

    async def copy_of(self, publication: Publication, progress: Progress) -> Publication:
        """Return a publication without a folder, with a path to the bytes fetched from its trainer's copy.

        Args:
            publication: with the digest of its index.
            progress: shows how it goes.

        Raises:
            PublishError: it is not offered, cannot be fetched, or nothing is served in this run.
        """
        if self._fetcher is None:
            raise PublishError("nothing is fetched over HTTP: set serving.enabled.")
        path = await self._fetcher.fetch(publication.version, publication.index, waits=False, progress=progress)
        return replace(publication, path=str(path))

    def close(self) -> None:
        """Stop fetching and serving, and release all holds. Blocks briefly."""
        self._copies.close()
        if self._fetcher is not None:
            self._fetcher.close()
