"""Put each version into the delta store before it is announced (``transport: delta``).

A version is stored as a delta to the last announced one, if this process wrote that one and no rewind abandoned it;
else, and every ``ANCHOR_EVERY`` versions, as an anchor. The base is always an announced version.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from penstock.consumers.weights.write import Written, temporary_folder
from penstock.errors import DiskFull, PublishError
from penstock.records.publication import Publication, is_abandoned
from penstock.system.disk import is_full
from penstock.weights.delta_format import WeightsFolder, write_delta
from penstock.weights.delta_store import DELTA, MARKER, Anchor, Delta, DeltaStore, catalog_of, kept, names_up_to

log = logging.getLogger(__name__)

#: Number of folders of this process that may still become a base.
_KEPT = 4


class Put(NamedTuple):
    """Describe a version in the store."""

    #: Bytes of its delta, 0 without one; and of its tensors.
    delta_bytes: int
    full_bytes: int
    #: Whether it has an anchor.
    is_anchor: bool
    took_s: float


class Deltas:
    """Write anchors and deltas of one trainer process. Calls block for disk, processor and store.

    Args:
        store: only this trainer writes to it.
        in_use: returns versions that engines hold, load or fetch, or that are pinned.
    """

    def __init__(self, store: DeltaStore, anchor_every: int, in_use: Callable[[], Collection[int]]) -> None:
        self._store, self._anchor_every, self._in_use = store, anchor_every, in_use
        #: Digest of an index -> version that this process wrote with it, the newest last.
        self._own: dict[str, Written] = {}
        self._anchored = 0
        #: Result for the last version.
        self.last: Put | None = None

    def put(self, written: Written, version: int, announced: Publication | None, abandoned: list[list[int]]) -> Put:
        """Put a written version into the store, complete, as a delta or both, and delete versions no longer needed.

        Args:
            announced: the newest publication in Redis; None: none.
            abandoned: versions that rewinds abandoned.

        Raises:
            PublishError: the store or the disk failed, or the folder is incomplete; nothing was marked.
            DiskFull: no space left; the call may be retried.
        """
        began = time.monotonic()
        try:
            delta_bytes = self._put_delta(written, version, announced, abandoned)
            is_anchor = not delta_bytes or version - self._anchored >= self._anchor_every
            if is_anchor:
                self._put_anchor(written, version)
            self._own.pop(written.index_digest, None)
            self._own[written.index_digest] = written
            self._own = dict([*self._own.items()][-_KEPT:])
            # Until the new version is announced, workers fetch the last one.
            self._delete_old(version, set() if announced is None else {announced.version})
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {version} cannot be put into trainer.delta_store: {exc}.") from exc
        self.last = Put(delta_bytes, written.num_bytes, is_anchor, time.monotonic() - began)
        log.info("version %d is in the delta store: %s", version, self.last)
        return self.last

    def _put_delta(
        self, written: Written, version: int, announced: Publication | None, abandoned: list[list[int]]
    ) -> int:
        """Store the delta to the announced version; return the number of its bytes, 0 without a delta."""
        if announced is None or is_abandoned(announced.version, abandoned) or announced.index == written.index_digest:
            return 0
        if (base := self._own.get(announced.index)) is None:
            return 0
        group = Delta(announced.version, base.index_digest, version, written.index_digest).group
        try:
            old, new = (WeightsFolder(one.path, one.index_digest) for one in (base, written))
            with temporary_folder(written.path.parent, version) as temporary:
                num_bytes = write_delta(old, new, temporary / DELTA)
                self._store.put(f"{group}/{DELTA}", temporary / DELTA)
            self._store.mark(f"{group}/{MARKER}")
        except PublishError as exc:
            # The base was deleted or is damaged; an anchor does not need it.
            log.warning("storing version %d as an anchor because no delta can be made: %s", version, exc)
            return 0
        return num_bytes

    def _put_anchor(self, written: Written, version: int) -> None:
        group = Anchor(version, written.index_digest).group
        for file in sorted(written.path.iterdir()):
            self._store.put(f"{group}/{file.name}", file)
        self._store.mark(f"{group}/{MARKER}")
        self._anchored = version

    def _delete_old(self, version: int, announced: set[int]) -> None:
        """Delete anchors and deltas that are not needed, and what killed trainers left incomplete."""
        try:
            names = self._store.names()
            stay = kept(catalog_of(names), announced | set(self._in_use()), version)
            gone = [name for name in names_up_to(version, names) if name.partition("/")[0] not in stay]
            # Markers first, so that no half-deleted version counts as complete.
            for name in sorted(gone, key=lambda one: not one.endswith(f"/{MARKER}")):
                self._store.delete(name)
        except (OSError, PublishError) as exc:
            # The version itself is stored; the next one deletes the rest.
            log.warning("failed to delete old versions from trainer.delta_store: %s", exc)
