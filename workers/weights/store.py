"""Provide the folder that an engine loads: the trainer's, a download, or a copy from deltas (``transport: delta``)."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import DiskFull, PublishError
from penstock.protocol.waits import Waiting
from penstock.records.cause import Cause
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import CopyMade, WeightsFetched
from penstock.weights.index import read_index
from penstock.workers.services import Tally
from penstock.workers.weights.download import Download
from penstock.workers.weights.machine_lock import Stopped
from penstock.workers.weights.version_folders import VersionFolders

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
        #: Cause of the wait of a fetch, also set by its thread; and the one to report if that has none.
        self._cause: Cause | None = None
        self._default: Cause | None = None
        #: Makes copies from deltas, or downloads; None: the trainer's folders are used.
        self._source: VersionFolders | None = None
        self._makes_copies = config.trainer.transport == "delta"
        if self._makes_copies:
            from penstock.weights.delta_store import DeltaStore
            from penstock.workers.weights.local_copies import LocalCopies

            self._source = LocalCopies(
                config.copies_dir, DeltaStore(config.delta_store), config.worker.copies_bytes, self._blocked_on
            )
        elif config.serving.enabled:
            self._source = Download(config, keys, self._blocked_on)
        #: One thread, so that a fetch begins when the one before it has ended.
        self._thread = ThreadPoolExecutor(1, "weights")
        self._stop = threading.Event()
        #: The publication that is fetched, or was fetched ahead, and its fetch.
        self._task: tuple[str, asyncio.Task[Publication]] | None = None

    async def fetch(self, publication: Publication) -> Publication | None:
        """Return the publication with a path on this machine; None: it is being fetched.

        After None the caller selects again, as what to load may have changed, and calls this again. Waits for at most
        ``LOOK_S``, and reports the wait.

        Raises:
            PublishError: it cannot be made or downloaded.
        """
        if self._source is None or not publication.index:
            return publication
        is_same = self.prefetch(publication)
        assert self._task is not None
        _, task = self._task
        if is_same and task.done():
            self._task = None
            self._waiting.end()
            return task.result()
        await asyncio.wait([task], timeout=LOOK_S)
        if self._cause is not None:
            self._waiting.blocked_on(self._cause)
        return None

    def prefetch(self, publication: Publication) -> bool:
        """Begin to fetch a publication; return False while a copy is made of another one, which is not interrupted."""
        if self._task is not None:
            id_, task = self._task
            if id_ == publication.id:
                return True
            if self._makes_copies and not task.done():
                return False
            task.cancel()
        task = asyncio.ensure_future(self._fetch(publication))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._task = publication.id, task
        return True

    def close(self) -> None:
        """Stop fetching, and release all holds. Blocks briefly."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._source is not None:
            self._source.close()

    def _blocked_on(self, cause: Cause | None) -> None:
        self._cause = cause or self._default

    async def _fetch(self, publication: Publication) -> Publication:
        source, version = self._source, publication.version
        assert source is not None
        if not self._makes_copies and await asyncio.to_thread(_has_index, publication):
            return publication
        stop = self._stop = threading.Event()
        self._cause = self._default = CopyMade(version) if self._makes_copies else WeightsFetched(version)
        try:
            path = await asyncio.get_running_loop().run_in_executor(self._thread, source.get, publication, stop.is_set)
        except asyncio.CancelledError:
            stop.set()
            raise
        except (PublishError, DiskFull) as exc:
            if isinstance(exc, Stopped) or not await asyncio.to_thread(_has_index, publication):
                raise PublishError(str(exc), exc.cause if isinstance(exc, PublishError) else None) from exc
            log.error("version %d is loaded from %s: %s", version, publication.path, exc)
            return publication
        finally:
            self._cause = None
        self._tally.weight_copies[source.last.how] += 1
        self._tally.weight_copy_bytes += source.last.num_bytes
        self._tally.weight_copy_s += source.last.took_s
        return replace(publication, path=str(path))


def _has_index(publication: Publication) -> bool:
    """Return whether the path has this version; an earlier run may have left another one there. Blocks."""
    try:
        read_index(Path(publication.path), publication.index)
    except PublishError:
        return False
    return True
