"""Make copies of versions on this machine for ``transport: delta``, before an engine is touched.

    held, without the lock:    proven copy? ─no──┐
    under the lock:            proven copy? <────┘
                               └─no─> chain ─> anchor or copy ─> deltas ─> verify ─> rename

A copy is valid if its index is the announced one and its files have their checksums. If a chain fails, the error is
logged and the next best chain is tried; the error of the last one is raised.
"""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DiskFull, PublishError
from penstock.records.causes import Cause
from penstock.records.publication import Publication
from penstock.system.disk import fsync, is_full
from penstock.weights.delta_format import WeightsFolder, apply_delta
from penstock.weights.delta_store import DELTA, Anchor, Chain, Delta, DeltaStore, catalog_of, find_chains
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, read_index
from penstock.weights.serving import object_name
from penstock.workers.weights.file_hashes import prove
from penstock.workers.weights.machine_lock import Stopped, alone_in
from penstock.workers.weights.version_folders import Hold, VersionFolders

log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """Describe how the copy of one version was obtained."""

    #: Bytes fetched from the store; 0: the copy existed.
    num_bytes: int = 0
    #: Whether an anchor was fetched.
    is_whole: bool = False
    num_deltas: int = 0
    took_s: float = 0.0

    @property
    def how(self) -> str:
        """Return ``whole`` (an anchor, perhaps with deltas), ``deltas`` (deltas alone) or ``here`` (it existed)."""
        return "whole" if self.is_whole else "deltas" if self.num_deltas else "here"


class LocalCopies:
    """Make copies in one folder of this machine, for one engine. Calls block for long; one thread at a time.

    Args:
        folder: as of ``VersionFolders``. All workers of one user may share it.
        max_bytes: most bytes of all copies in it, including the one in progress and objects fetched for it.
        stopped: called often; True aborts a call with PublishError.
        blocked_on: called periodically with the cause of a wait; None at its end.
    """

    def __init__(
        self,
        folder: Path,
        store: DeltaStore,
        max_bytes: int,
        stopped: Callable[[], bool] = lambda: False,
        blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    ) -> None:
        self._folders = VersionFolders(folder, max_bytes, "worker.copies_bytes")
        self._store, self._max_bytes = store, max_bytes
        self._stopped, self._blocked_on = stopped, blocked_on
        #: Outcome for the last version.
        self.last: Fetched | None = None

    def get(self, publication: Publication) -> Path:
        """Return the folder of a verified copy of ``publication``; it is kept until two others were requested.

        Raises:
            PublishError: no chain to the version, all failed, an engine may read a damaged copy of it, or a process
                that makes a copy here is stalled.
            DiskFull: the disk is full.
        """
        began, fetched, folders = time.monotonic(), Fetched(), self._folders
        try:
            path = folders.find(publication.index, repairs=False)
            if path is None:
                with alone_in(folders.lock_file(), self._blocked_on, self._stopped):
                    folders.remove_leftovers()
                    path = folders.find(publication.index, repairs=True)
                    if path is None:
                        path, fetched = self._make(publication)
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {publication.version} cannot be copied to {folders.folder}: {exc}.") from exc
        self.last = fetched._replace(took_s=time.monotonic() - began)
        log.info("version %d copied to this machine: %s", publication.version, self.last)
        return path

    def close(self) -> None:
        """Release all copies."""
        self._folders.close()

    def _make(self, publication: Publication) -> tuple[Path, Fetched]:
        catalog = catalog_of(self._store.names())
        #: Groups of the store and digests of local copies that were found damaged.
        avoid: set[str] = set()
        failure = "it has neither a whole version nor a chain that leads there"
        cause: PublishError | None = None
        while True:
            chains = find_chains(catalog, publication.index, self._folders.by_index().keys() - avoid, avoid)
            if not chains:
                raise PublishError(
                    f"version {publication.version} of {publication.model!r} cannot be made from the delta store: "
                    f"{failure}.",
                    cause.cause if cause is not None else None,
                ) from cause
            try:
                return self._make_by(chains[0], publication)
            except _Broken as broken:
                cause, failure = broken.cause, str(broken.cause).rstrip(".")
                if self._stopped():
                    raise Stopped(str(cause)) from cause
                log.warning("copy of version %d failed, trying another chain: %s", publication.version, cause)
                avoid |= {broken.avoid}
                if (damaged := self._folders.by_index().get(broken.avoid)) is not None:
                    self._folders.remove(damaged)

    def _make_by(self, chain: Chain, publication: Publication) -> tuple[Path, Fetched]:
        """Make a version by one chain, and hold it; raise _Broken."""
        making = self._folders.temporary(f"{publication.version:08d}")
        making.mkdir()
        num_bytes, is_local = 0, chain.start is None
        try:
            if chain.start is None:
                at = self._folders.by_index()[chain.base]
            else:
                at, num_bytes = self._fetch_anchor(chain.start, making)
            for delta in chain.deltas:
                with closing(Hold(at)):
                    step, fetched = self._patch(delta, at, making, is_local)
                num_bytes += fetched
                if at.parent == making:
                    shutil.rmtree(at)
                at, is_local = step, False
            path = self._folders.add(at, object_name(publication.version, publication.index))
            return path, Fetched(num_bytes, chain.start is not None, len(chain.deltas))
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _fetch_anchor(self, anchor: Anchor, making: Path) -> tuple[Path, int]:
        into = making / "anchor"
        into.mkdir()
        try:
            num_bytes = self._fetch(f"{anchor.group}/{INDEX_FILE}", into / INDEX_FILE, MAX_INDEX_BYTES)
            index = read_index(into, anchor.index)
            self._folders.make_room(sum(index.sizes.values()))
            with as_publish_error(f"{anchor.group} cannot be fetched"):
                for name in index.files:
                    num_bytes += self._fetch(f"{anchor.group}/{name}", into / name, index.sizes.get(name, 0))
                prove(into, anchor.index)
                fsync(into)
        except PublishError as exc:
            raise _Broken(exc, anchor.group) from exc
        return into, num_bytes

    def _patch(self, delta: Delta, at: Path, making: Path, is_local: bool) -> tuple[Path, int]:
        """Apply a delta to a second folder; ``at``, which an engine may read, is not written."""
        file, into = making / DELTA, making / f"v{delta.version:08d}"
        into.mkdir()
        try:
            base = WeightsFolder(at, delta.base_index)
            size = sum(base.index.sizes.values())
            self._folders.make_room(size)
            with as_publish_error(f"{delta.group} cannot be applied"):
                # A delta is at most as large as its base, or it is not worth fetching.
                num_bytes = self._fetch(f"{delta.group}/{DELTA}", file, size + MAX_INDEX_BYTES)
                self._folders.make_room(size + num_bytes, present=num_bytes)
                apply_delta(file, base, into, delta.index, self._stopped)
        except PublishError as exc:
            try:
                if is_local:
                    prove(at, delta.base_index)
            except PublishError:
                raise _Broken(exc, delta.base_index) from exc  # the delta itself may be valid
            raise _Broken(exc, delta.group) from exc
        file.unlink()
        return into, num_bytes

    def _fetch(self, name: str, into: Path, max_bytes: int) -> int:
        return self._store.fetch(name, into, min(max_bytes, self._max_bytes), self._stopped)


class _Broken(Exception):
    """A chain failed; names the group of the store, or the digest of a local copy, to avoid."""

    def __init__(self, cause: PublishError, avoid: str) -> None:
        super().__init__(str(cause))
        self.cause, self.avoid = cause, avoid
