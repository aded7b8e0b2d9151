"""Make copies of versions on this machine for ``transport: delta``, before an engine is touched.

    on this machine? ─no─> lock ─> chain ─> anchor or copy ─> deltas ─> verify ─> rename

A copy is valid if its index is the announced one and its files have their checksums. If a chain fails, the error is
logged and the next best chain is tried; the error of the last one is raised. A full disk ends the attempt at once.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.weights.delta_format import WeightsFolder, apply_delta
from penstock.weights.delta_store import DELTA, Anchor, Chain, Delta, DeltaStore, catalog_of, find_chain
from penstock.weights.index import MAX_INDEX_BYTES, as_publish_error
from penstock.weights.serving import object_name
from penstock.workers.weights.file_hashes import prove
from penstock.workers.weights.machine_lock import Stopped
from penstock.workers.weights.version_folders import Fetched, Hold, NoRoom, Report, VersionFolders, size_of

log = logging.getLogger(__name__)


class LocalCopies(VersionFolders):
    """Make copies in one folder of this machine, for one engine.

    Args:
        folder: as of ``VersionFolders``. All workers of one user may share it.
        max_bytes: most bytes of all copies in it, including the one in progress and objects fetched for it.
    """

    def __init__(
        self, folder: Path, store: DeltaStore, max_bytes: int, blocked_on: Report = lambda cause: None
    ) -> None:
        super().__init__(folder, max_bytes, "worker.copies_bytes", blocked_on)
        self._store = store
        #: Group of the store that the last step used.
        self._group = ""

    def make(self, publication: Publication) -> tuple[Path, Fetched]:
        """Make a copy by the best chain. Raises PublishError (no chain, or all failed), NoRoom and OSError."""
        self.remove_leftovers()
        catalog = catalog_of(self._store.names())
        #: Groups of the store and digests of local copies that were found damaged.
        avoid: set[str] = set()
        failure: PublishError | None = None
        while chain := find_chain(catalog, publication.index, self.by_index().keys() - avoid, avoid):
            try:
                return self._make_by(chain, publication)
            except PublishError as exc:
                failure = exc
                if self.stopped():
                    raise Stopped(str(exc)) from exc
                if isinstance(exc, NoRoom):
                    raise
                log.warning("copy of version %d failed, trying another chain: %s", publication.version, exc)
                avoid.add(self._damaged(chain))
        why = "it has neither a whole version nor a chain that leads there" if failure is None else str(failure)
        raise PublishError(
            f"version {publication.version} of {publication.model!r} cannot be made from the delta store: "
            f"{why.rstrip('.')}.",
            None if failure is None else failure.cause,
        ) from failure

    def _damaged(self, chain: Chain) -> str:
        """Return the part for which a chain failed: its local copy, which is deleted, or the last group it used."""
        # Room for a later step may have taken the local copy.
        if chain.start is None and (at := self.by_index().get(chain.base)) is not None:
            try:
                prove(at, chain.base)
            except PublishError:
                self.remove(at)
                return chain.base
        return self._group

    def _make_by(self, chain: Chain, publication: Publication) -> tuple[Path, Fetched]:
        """Make a version by one chain, and hold it; raise PublishError if one of its parts is damaged. OSError."""
        making = self.temporary(f"{publication.version:08d}")
        making.mkdir()
        num_bytes = 0
        try:
            if chain.start is None:
                at = self.by_index()[chain.base]
            else:
                at, num_bytes = self._fetch_anchor(chain.start, making)
            for delta in chain.deltas:
                with closing(Hold(at)):
                    step, fetched = self._patch(delta, at, making)
                num_bytes += fetched
                if at.parent == making:
                    shutil.rmtree(at)
                at = step
            path = self.add(at, object_name(publication.version, publication.index))
            return path, Fetched(num_bytes, chain.start is not None, len(chain.deltas))
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _fetch_anchor(self, anchor: Anchor, making: Path) -> tuple[Path, int]:
        into, self._group = making / "anchor", anchor.group

        def fetch(sizes: Mapping[str, int]) -> None:
            for name, size in sizes.items():
                self._fetch(f"{anchor.group}/{name}", into / name, size)

        with as_publish_error(f"{anchor.group} cannot be fetched"):
            self.complete(into, anchor.index, fetch)
            return into, size_of(into)

    def _patch(self, delta: Delta, at: Path, making: Path) -> tuple[Path, int]:
        """Apply a delta to a second folder; ``at``, which an engine may read, is not written."""
        file, into, self._group = making / DELTA, making / f"v{delta.version:08d}", delta.group
        into.mkdir()
        base = WeightsFolder(at, delta.base_index)
        size = sum(base.index.sizes.values())
        self.make_room(size)
        with as_publish_error(f"{delta.group} cannot be applied"):
            # A delta is at most as large as its base, or it is not worth fetching.
            num_bytes = self._fetch(f"{delta.group}/{DELTA}", file, size + MAX_INDEX_BYTES)
            self.make_room(size + num_bytes, present=num_bytes)
            apply_delta(file, base, into, delta.index, self.stopped)
        file.unlink()
        return into, num_bytes

    def _fetch(self, name: str, into: Path, max_bytes: int) -> int:
        return self._store.fetch(name, into, min(max_bytes, self.max_bytes), self.stopped)
