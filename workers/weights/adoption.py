"""Publications of the weights that an engine has already: it takes their number, and nothing is verified or loaded.

These are ticks, the first publication of a restored trainer, and steps that changed nothing. Requests continue under
every policy, and find the prefixes that were cached before. Two publications have the same weights if the digests of
their indexes are equal, and the engine has those that were loaded if its server still reports their version.
"""

import asyncio
import logging
from dataclasses import replace

from penstock.errors import EngineDied, EngineError
from penstock.protocol.records.publication import Publication
from penstock.workers.services import Services
from penstock.workers.weights.folders import Folders

log = logging.getLogger(__name__)


class Adoption:
    """Give the weights of one engine the numbers of later publications."""

    def __init__(self, services: Services, folders: Folders) -> None:
        self._services = services
        self._folders = folders
        #: Folder on this machine that the engine's weights were loaded from, if that is not the announced one; else ''.
        self._local_path = ""

    def note_loaded(self, publication: Publication, here: Publication) -> None:
        """Record what the engine has; ``here``: with its folder on this machine."""
        self._local_path = here.path if here.path != publication.path else ""

    def with_folder(self, publication: Publication) -> Publication:
        """Return a publication of the weights that the engine has, with its folder on this machine."""
        return replace(publication, path=self._local_path or publication.path)

    async def is_due(self, publication: Publication, loaded: Publication | None) -> bool:
        """Return whether ``publication`` is newer and proven to have the engine's weights. Blocks for a round trip.

        False if a rewind abandoned the engine's version: what runs under that is not continued (T1).

        Args:
            loaded: what the engine has, or had when it was lost.
        """
        engine = self._services.engine
        if loaded is None or (engine.version, engine.rev) != (loaded.version, loaded.rev) or not publication.index:
            return False
        if publication.version <= engine.version or publication.abandons(engine.version):
            return False
        if engine.offloaded or engine.is_receiving:
            return False
        found = await self._folders.there(loaded)
        return found is not None and found.index == publication.index

    async def take(self, publication: Publication, loaded: Publication | None) -> bool:
        """Make the engine adopt a publication that is due. Blocks for a few round trips.

        A cancellation waits for the end of the change, so that ``engine.version`` is what the server reports.

        Args:
            publication: with its folder on this machine; the engines of a router that join later load that.
            loaded: as of :meth:`is_due`.

        Returns:
            False: it has to be loaded; the engine has other weights, or its server cannot change its number.

        Raises:
            EngineDied: the engine was lost, or has other weights than were loaded into it.
        """
        services = self._services
        async with services.valves.applying:
            if services.engine_lost.is_set() or not await self.is_due(publication, loaded):
                return False
            task = asyncio.create_task(services.engine.adopt(publication))
            try:
                await asyncio.shield(task)
            except EngineDied:
                raise
            except EngineError as exc:
                log.warning("version %d is loaded, though the engine has its weights: %s", publication.version, exc)
                return False
            except asyncio.CancelledError:
                await asyncio.wait({task})
                raise
        log.info("version %d has the weights that are loaded: the engine took its number", publication.version)
        return True
