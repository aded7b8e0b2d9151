"""Provide the folder that an engine loads: the trainer's, a download, or a copy from deltas (``transport: delta``)."""

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import DiskFull, PublishError
from penstock.protocol.waits import Waiting
from penstock.records.causes import Cause, CopyMade, WeightsFetched
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.weights.file_errors import is_folder
from penstock.weights.index import read_index
from penstock.workers.services import Tally
from penstock.workers.weights.download import Download, Progress

log = logging.getLogger(__name__)

#: Interval of reports of a wait.
LOOK_S = 0.1


class WeightStore:
    """Provide the folders of publications on this machine for one worker. Raises ConfigError as ``Download``.

    One fetch runs at a time: of the version to load, or, while that has to wait, ahead of it.

    Args:
        tally: counts each copy.
    """

    def __init__(self, config: Config, keys: Keys, waiting: Waiting, tally: Tally) -> None:
        self._waiting, self._tally = waiting, tally
        self._download = Download(config, keys) if config.serving.enabled else None
        self._stop = threading.Event()
        #: Cause of the wait of a fetch; also set by the thread that copies.
        self._cause: Cause | None = None
        self._version = -1
        self._copies = None
        if config.trainer.transport == "delta":
            from penstock.weights.delta_store import DeltaStore
            from penstock.workers.weights.local_copies import LocalCopies

            self._copies = LocalCopies(
                config.copies_dir,
                DeltaStore(config.delta_store),
                config.worker.copies_bytes,
                self._stop.is_set,
                self._blocked_on,
            )
        #: The publication that is fetched, or was fetched ahead, and its fetch.
        self._task: tuple[str, asyncio.Task[Publication]] | None = None

    async def fetch(self, publication: Publication) -> Publication:
        """Return the publication with a path on this machine; wait, and report the wait. The engine keeps running.

        Raises:
            PublishError: it cannot be made or downloaded.
        """
        while not self.prefetch(publication):
            await self._wait()
        assert self._task is not None
        _, task = self._task
        try:
            await self._wait()
            return task.result()
        finally:
            self._task = None
            task.cancel()

    def prefetch(self, publication: Publication) -> bool:
        """Begin to fetch a publication; return False while a copy is made of another one, which is not interrupted."""
        if self._task is not None:
            id_, task = self._task
            if id_ == publication.id:
                return True
            if self._copies is not None and not task.done():
                return False
            task.cancel()
        task = asyncio.ensure_future(self._fetch(publication))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._task = publication.id, task
        return True

    def close(self) -> None:
        """Stop fetching, and release all holds. Blocks briefly."""
        self._stop.set()
        if self._copies is not None:
            self._copies.close()
        if self._download is not None:
            self._download.close()

    async def _wait(self) -> None:
        """Wait until the fetch ends."""
        assert self._task is not None
        is_reported = False
        while not self._task[1].done():
            await asyncio.wait([self._task[1]], timeout=LOOK_S)
            if self._cause is not None:
                self._waiting.blocked_on(self._cause)
                is_reported = True
        if is_reported:
            self._waiting.end()

    def _blocked_on(self, cause: Cause | None) -> None:
        self._cause = cause or CopyMade(self._version)

    async def _fetch(self, publication: Publication) -> Publication:
        if not publication.index:
            return publication
        self._cause = None
        try:
            if self._copies is not None:
                path = await self._copy(publication)
            elif self._download is None or await asyncio.to_thread(_has_index, publication):
                return publication
            else:
                path = await self._downloaded(self._download, publication)
        finally:
            self._cause = None
        return replace(publication, path=str(path))

    async def _downloaded(self, download: Download, publication: Publication) -> Path:
        progress = Progress(WeightsFetched(publication.version))
        coming = asyncio.ensure_future(download.fetch(publication.version, publication.index, progress))
        try:
            while not coming.done():
                self._cause = progress.cause
                await asyncio.wait([coming], timeout=LOOK_S)
        finally:
            coming.cancel()
        return coming.result()

    async def _copy(self, publication: Publication) -> Path:
        """Return a verified copy; the trainer's folder, with a logged error, if none can be made and that is visible.

        Raises:
            PublishError: neither.
        """
        assert self._copies is not None
        self._version, self._cause = publication.version, CopyMade(publication.version)
        try:
            path = await asyncio.to_thread(self._copies.get, publication)
        except asyncio.CancelledError:
            self._stop.set()
            raise
        except (PublishError, DiskFull) as exc:
            folder, cause = Path(publication.path), exc.cause if isinstance(exc, PublishError) else None
            try:
                is_visible = not self._stop.is_set() and await asyncio.to_thread(is_folder, folder)
            except PublishError as unknown:
                raise PublishError(f"{exc} {unknown}", cause) from exc
            if not is_visible:
                raise PublishError(str(exc), cause) from exc
            log.error("version %d is loaded from %s: %s", publication.version, folder, exc)
            return folder
        if (copy := self._copies.last) is not None:
            self._tally.weight_copies[copy.how] += 1
            self._tally.weight_copy_bytes += copy.num_bytes
            self._tally.weight_copy_s += copy.took_s
        return path


def _has_index(publication: Publication) -> bool:
    """Return whether the path has this version; an earlier run may have left another one there. Blocks."""
    try:
        read_index(Path(publication.path), publication.index)
    except PublishError:
        return False
    return True
