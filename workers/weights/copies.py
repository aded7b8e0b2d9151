"""Select the folder an engine loads from: the trainer's, or a copy on this machine (``transport: delta``)."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.errors import DiskFull, PublishError
from penstock.protocol.waits import Waiting
from penstock.records.causes import Cause, CopyMade, VersionNotServed
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.weights.deltas.objects import Objects, open_objects
from penstock.weights.file_errors import is_folder
from penstock.workers.services import Tally
from penstock.workers.weights.fetch.fetcher import LOOK_S, OFFER_WAIT_S, Fetcher
from penstock.workers.weights.fetch.nearby import Nearby

if TYPE_CHECKING:
    from penstock.workers.weights.fetch.spool import Spool
    from penstock.workers.weights.local_copies import LocalCopies

log = logging.getLogger(__name__)


class Copies:
    """Make copies for the engine of one worker.

    Args:
        tally: counts each copy.
        fetcher: fetches anchors and deltas if the store of deltas is not reachable, and serves copies to other workers;
            None: neither.
    """

    def __init__(self, config: Config, waiting: Waiting, tally: Tally, fetcher: Fetcher | None = None) -> None:
        self._config, self._waiting, self._tally, self._fetcher = config, waiting, tally, fetcher
        self._stop = threading.Event()
        self._made: LocalCopies | None = None
        #: The store of deltas, and objects fetched over HTTP; None: the store alone.
        self._sources: tuple[Objects, Spool] | None = None
        #: Reports what the copying thread waits for.
        self._blocked_on: Callable[[Cause | None], None] = lambda cause: None

    @property
    def _copies(self) -> "LocalCopies":
        """The local copies, created on first use."""
        if self._made is None:
            from penstock.workers.weights.fetch.spool import Spool
            from penstock.workers.weights.local_copies import FETCHED, LocalCopies

            config = self._config
            store = open_objects(config.delta_store)
            if self._fetcher is not None:
                self._sources = store, Spool(self._fetcher, config.copies_dir / FETCHED, self._stop.is_set)
            self._made = LocalCopies(
                config.copies_dir,
                store,
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
        if is_copy and self._fetcher is not None:
            await self._fetcher.serve(publication.version, publication.index, path)
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
            copies = self._copies
            if self._sources is not None:
                copies.objects = self._source_of(copies, self._sources, publication)
            return copies.get(publication), True
        except (PublishError, DiskFull) as exc:
            folder = Path(publication.path)
            if self._stop.is_set() or not _is_seen(folder, exc):
                raise PublishError(str(exc), _cause_of(exc)) from exc
            log.error("version %d is loaded from %s: %s", publication.version, folder, exc)
            return folder, False

    def _source_of(self, copies: "LocalCopies", sources: "tuple[Objects, Spool]", publication: Publication) -> Objects:
        """Return the first source that has a path to the version; wait for an offer over HTTP, without the lock.

        Raises:
            PublishError: none has one within ``OFFER_WAIT_S``.
        """
        deadline = time.monotonic() + OFFER_WAIT_S
        _, spool = sources
        while True:
            for source in sources:
                try:
                    if copies.leads(source, publication.index):
                        return source
                except PublishError as exc:
                    failure = f": {exc}"
                else:
                    failure = "."
            if spool.is_superseded(publication.version):
                raise PublishError(f"version {publication.version} was not offered before a newer one was announced.")
            if time.monotonic() > deadline or self._stop.is_set():
                raise PublishError(
                    f"version {publication.version} is neither in trainer.delta_store, as this machine sees it, nor "
                    "offered over HTTP: set serving.enabled for its trainer too, or give a store that workers see"
                    f"{failure}",
                    VersionNotServed(publication.version),
                )
            self._stop.wait(LOOK_S)


def _is_seen(folder: Path, why: Exception) -> bool:
    """Return whether the trainer's folder exists; if unknown, raise PublishError that includes ``why``."""
    try:
        return is_folder(folder)
    except PublishError as exc:
        raise PublishError(f"{why} {exc}", _cause_of(why)) from why


def _cause_of(exc: Exception) -> Cause | None:
    return exc.cause if isinstance(exc, PublishError) else None


class Here:
    """Provide the folders of publications on this machine for one worker. Raises ConfigError as ``Fetcher``."""

    def __init__(self, config: Config, keys: Keys, worker: str, waiting: Waiting, tally: Tally) -> None:
        self._fetcher = Fetcher(config, keys, worker) if config.serving.enabled else None
        self._copies = Copies(config, waiting, tally, self._fetcher)
        self._nearby = Nearby(self._fetcher, waiting)

    async def of(self, publication: Publication) -> Publication:
        """Return the publication with a path on this machine. Waits for the folder; the engine keeps running.

        Raises PublishError if it cannot be made or fetched.
        """
        return await self._nearby.of(await self._copies.of(publication))

    def close(self) -> None:
        """Stop fetching and serving, and release all holds. Blocks briefly."""
        self._copies.close()
        if self._fetcher is not None:
            self._fetcher.close()
