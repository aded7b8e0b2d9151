"""Select the folder an engine loads from: the trainer's, or a copy on this machine (``transport: delta``)."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.errors import DiskFull, PublishError
from penstock.protocol.waits import Waiting
from penstock.records.causes import Cause, CopyMade, WeightsFetched
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.weights.delta_store import DeltaStore
from penstock.weights.file_errors import is_folder
from penstock.weights.index import read_index
from penstock.workers.services import Tally
from penstock.workers.weights.download import LOOK_S, Download, Progress

if TYPE_CHECKING:
    from penstock.workers.weights.local_copies import LocalCopies

log = logging.getLogger(__name__)


class Copies:
    """Make copies for the engine of one worker.

    Args:
        tally: counts each copy.
    """

    def __init__(self, config: Config, waiting: Waiting, tally: Tally) -> None:
        self._config, self._waiting, self._tally = config, waiting, tally
        self._stop = threading.Event()
        self._made: LocalCopies | None = None
        #: Reports what the copying thread waits for.
        self._blocked_on: Callable[[Cause | None], None] = lambda cause: None

    @property
    def _copies(self) -> "LocalCopies":
        """The local copies, created on first use."""
        if self._made is None:
            from penstock.workers.weights.local_copies import LocalCopies

            config = self._config
            self._made = LocalCopies(
                config.copies_dir,
                DeltaStore(config.delta_store),
                config.worker.copies_bytes,
                self._stop.is_set,
                lambda cause: self._blocked_on(cause),
            )
        return self._made

    async def of(self, publication: Publication) -> Publication:
        """Return the publication with a verified copy on this machine, if the run makes copies; else unchanged.

        Waits for the copy while the engine keeps running. If it cannot be made and the trainer's own folder is
        accessible, that folder is used and the failure is logged.

        Raises:
            PublishError: no copy can be made, and the trainer's folder is not accessible.
        """
        if self._config.trainer.transport != "delta" or not publication.index:
            return publication
        copied, loop = CopyMade(publication.version), asyncio.get_running_loop()

        def blocked_on(cause: Cause | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._waiting.blocked_on, cause or copied)

        self._blocked_on = blocked_on
        self._waiting.blocked_on(copied)
        try:
            path, is_copy = await asyncio.to_thread(self._get, publication)
        except asyncio.CancelledError:
            self._stop.set()
            raise
        finally:
            self._waiting.end()
        if is_copy:
            self._count()
        return replace(publication, path=str(path))

    def _count(self) -> None:
        if (copy := self._copies.last) is not None:
            self._tally.weight_copies[copy.how] += 1
            self._tally.weight_copy_bytes += copy.num_bytes
            self._tally.weight_copy_s += copy.took_s

    def close(self) -> None:
        """Stop making copies and release all holds."""
        self._stop.set()
        if self._made is not None:
            self._made.close()

    def _get(self, publication: Publication) -> tuple[Path, bool]:
        """Return the folder, and whether it is a copy. Blocks."""
        try:
            return self._copies.get(publication), True
        except (PublishError, DiskFull) as exc:
            folder = Path(publication.path)
            if self._stop.is_set() or not _is_seen(folder, exc):
                raise PublishError(str(exc), _cause_of(exc)) from exc
            log.error("version %d is loaded from %s: %s", publication.version, folder, exc)
            return folder, False


def _is_seen(folder: Path, why: Exception) -> bool:
    """Return whether the trainer's folder exists; if unknown, raise PublishError that includes ``why``."""
    try:
        return is_folder(folder)
    except PublishError as exc:
        raise PublishError(f"{why} {exc}", _cause_of(why)) from why


def _cause_of(exc: Exception) -> Cause | None:
    return exc.cause if isinstance(exc, PublishError) else None


class WeightStore:
    """Provide the folders of publications on this machine for one worker. Raises ConfigError as ``Download``.

    One fetch runs at a time: of the version to load, or, while that has to wait, ahead of it.
    """

    def __init__(self, config: Config, keys: Keys, waiting: Waiting, tally: Tally) -> None:
        self._waiting, self._progress = waiting, Waiting()
        self._download = Download(config, keys) if config.serving.enabled else None
        self._copies = Copies(config, self._progress, tally)
        self._is_delta = config.trainer.transport == "delta"
        #: The publication that is fetched, or was fetched ahead, and its fetch.
        self._task: tuple[str, asyncio.Task[Publication]] | None = None

    async def fetch(self, publication: Publication) -> Publication:
        """Return the publication with a path on this machine; wait, and report the wait. The engine keeps running.

        Raises:
            PublishError: it cannot be made or fetched.
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
            if self._is_delta and not task.done():
                return False
            task.cancel()
        task = asyncio.ensure_future(self._fetch(publication))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._task = publication.id, task
        return True

    async def _fetch(self, publication: Publication) -> Publication:
        publication = await self._copies.of(publication)
        if self._download is None or not publication.index or await asyncio.to_thread(_has_index, publication):
            return publication
        progress = Progress(WeightsFetched(publication.version))
        coming = asyncio.ensure_future(self._download.fetch(publication.version, publication.index, progress))
        try:
            while not coming.done():
                self._progress.blocked_on(progress.cause)
                await asyncio.wait([coming], timeout=LOOK_S)
        finally:
            coming.cancel()
        self._progress.end()
        return replace(publication, path=str(coming.result()))

    async def _wait(self) -> None:
        """Wait until the fetch ends."""
        assert self._task is not None
        while not self._task[1].done():
            if self._progress.cause is not None:
                self._waiting.blocked_on(self._progress.cause)
            await asyncio.wait([self._task[1]], timeout=LOOK_S)
        self._waiting.end()

    def close(self) -> None:
        """Stop downloading, and release all holds. Blocks briefly."""
        self._copies.close()
        if self._download is not None:
            self._download.close()


def _has_index(publication: Publication) -> bool:
    """Return whether the path has this version; an earlier run may have left another one there. Blocks."""
    try:
        read_index(Path(publication.path), publication.index)
    except PublishError:
        return False
    return True
