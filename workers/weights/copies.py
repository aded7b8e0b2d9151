"""Where an engine loads a publication from: the trainer's folder, or a copy on this machine (``transport: delta``)."""

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.errors import DiskFull, PublishError
from penstock.protocol.records.publication import Publication
from penstock.protocol.waits import Waiting
from penstock.weights.deltas.objects import open_objects

if TYPE_CHECKING:
    from workers.weights.local_copies import LocalCopies

log = logging.getLogger(__name__)


class Copies:
    """Copies for the engine of one worker."""

    def __init__(self, config: Config, waiting: Waiting) -> None:
        self._config, self._waiting = config, waiting
        self._stop = threading.Event()
        self._made: LocalCopies | None = None

    @property
    def _copies(self) -> "LocalCopies":
        """Made when it is first needed."""
        if self._made is None:
            from workers.weights.local_copies import LocalCopies

            config = self._config
            store = open_objects(config.delta_store)
            self._made = LocalCopies(config.copies_dir, store, config.worker.copies_bytes, self._stop.is_set)
        return self._made

    async def of(self, publication: Publication) -> Publication:
        """The publication, to be loaded from a proven copy on this machine where the run makes such; else as it is.

        Waits until the copy is there, while the engine goes on. Where none can be made, and the trainer's own folder
        can be seen from here, that is the nearest whole version; the failure is logged.

        Raises:
            PublishError: no copy can be made, and the trainer's folder is not here.
        """
        if self._config.trainer.transport != "delta" or not publication.index:
            return publication
        self._waiting.for_(f"a copy of version {publication.version} on this machine")
        try:
            return replace(publication, path=str(await asyncio.to_thread(self._get, publication)))
        except asyncio.CancelledError:
            self._stop.set()
            raise
        finally:
            self._waiting.end()

    def _get(self, publication: Publication) -> Path:
        """Blocks."""
        try:
            return self._copies.get(publication)
        except (PublishError, DiskFull) as exc:
            folder = Path(publication.path)
            if self._stop.is_set() or not folder.is_dir():
                raise PublishError(str(exc)) from exc
            log.error("version %d is loaded from %s: %s", publication.version, folder, exc)
            return folder
