"""Put each version into the delta store before it is announced (``transport: delta``).

A version is led to from the one that was announced last, if this process wrote that and no rewind left it behind; else,
and every ``trainer.anchor_every`` versions, it is there whole. The base is what is in Redis, never what was merely
written.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from penstock.config import Config
from penstock.consumers.weights.publish import Written
from penstock.errors import DiskFull, PublishError
from penstock.records.causes import Cause, ObjectStoreFailing
from penstock.records.publication import Publication, is_abandoned
from penstock.system.disk import is_full
from penstock.system.stop import pause_s
from penstock.weights.deltas.chains import DELTA, MARKER, Anchor, Delta, catalog_of, groups_of, kept, version_of
from penstock.weights.deltas.folder import WeightsFolder
from penstock.weights.deltas.objects import ObjectStore, listed, open_objects
from penstock.weights.deltas.write import write_delta

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Tries of one object, and the pause between two, which doubles: a minute and a half in all, beside the tries.
TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
#: How often a pause is told of.
TELL_S = 0.5
#: What stays as it is.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class RetriedStore:
    """An ``ObjectStore`` whose ``names``, ``put`` and ``mark`` are tried so often; each may be done again.

    A delete is not: what stays is deleted with the next version.

    Args:
        blocked_on: called now and then with the cause of the wait; None at the end.
    """

    def __init__(self, store: ObjectStore, blocked_on: Callable[[Cause | None], None]) -> None:
        self._store, self._blocked_on = store, blocked_on

    def names(self) -> list[str]:
        return self._tried("", self._store.names)

    def put(self, name: str, path: Path) -> None:
        self._tried(name, lambda: self._store.put(name, path))

    def mark(self, name: str) -> None:
        self._tried(name, lambda: self._store.mark(name))

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        return self._store.near(group, room, stopped)

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        return self._store.open_range(name, start, end)

    def _tried(self, name: str, call: Callable[[], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return call()
                except OSError as exc:
                    failures += 1
                    if failures == TRIES or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    cause = ObjectStoreFailing(name, str(exc))
                    log.warning("try %d of %d failed, waiting for %s", failures, TRIES, cause)
                    self._pause(failures, cause)
        finally:
            if failures:
                self._blocked_on(None)

    def _pause(self, failures: int, cause: Cause) -> None:
        end = time.monotonic() + pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while (left := end - time.monotonic()) > 0:
            self._blocked_on(cause)
            time.sleep(min(left, TELL_S))


#: Folders of this process that may be a base still.
_KEPT = 4
_TEMPORARY = ".delta-"


class Put(NamedTuple):
    """A version in the store."""

    #: Bytes of its delta, 0 where there is none; and of its tensors.
    delta_bytes: int
    full_bytes: int
    #: Whether it is there whole.
    is_anchor: bool
    took_s: float


class Deltas:
    """Anchors and deltas of one trainer process. Calls block for disk, processor and store.

    Args:
        store: this trainer alone writes there.
        in_use: versions that somebody holds, loads, fetches or has pinned.
    """

    def __init__(self, store: ObjectStore, anchor_every: int, in_use: Callable[[], Collection[int]]) -> None:
        self._store, self._anchor_every, self._in_use = store, anchor_every, in_use
        #: Digest of an index -> what this process wrote under it, the newest last.
        self._own: dict[str, Written] = {}
        self._anchored = 0
        #: What became of the last version.
        self.last: Put | None = None

    def put(self, written: Written, version: int, announced: Publication | None, abandoned: list[list[int]]) -> Put:
        """Put a written version into the store, complete, as a delta or both, and delete versions no longer needed.

        Args:
            announced: the publication that is newest in Redis; None: there is none.
            abandoned: versions that rewinds left behind.

        Raises:
            PublishError: the store or the disk refuses, or the folder is not whole; nothing was marked.
            DiskFull: there is no room; it may be done again.
        """
        began = time.monotonic()
        try:
            if not self._own:
                self._remove_unmarked(written, version)
            delta_bytes = self._put_delta(written, version, announced, abandoned)
            is_anchor = not delta_bytes or version - self._anchored >= self._anchor_every
            if is_anchor:
                self._put_anchor(written, version)
            self._remember(written)
            # Until the new one is announced the last one is what is taken.
            self._delete_old(version, set() if announced is None else {announced.version})
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {version} cannot be put into trainer.delta_store: {exc}.") from exc
        self.last = Put(delta_bytes, written.num_bytes, is_anchor, time.monotonic() - began)
        log.info(
            "version %d is in the store of deltas: %d bytes of delta%s, %.3f s",
            version,
            delta_bytes,
            ", and whole" if is_anchor else "",
            self.last.took_s,
        )
        return self.last

    def _base_of(self, announced: Publication | None, abandoned: list[list[int]]) -> Written | None:
        """Return the base of the next delta; None: no version is both held by workers and known to this process."""
        if announced is None or is_abandoned(announced.version, abandoned):
            return None
        return self._own.get(announced.index)

    def _put_delta(
        self, written: Written, version: int, announced: Publication | None, abandoned: list[list[int]]
    ) -> int:
        base = self._base_of(announced, abandoned)
        if base is None or announced is None or base.index_digest == written.index_digest:
            return 0
        group = Delta(announced.version, base.index_digest, version, written.index_digest).group
        temporary = written.path.parent / f"{_TEMPORARY}{version:08d}-{os.getpid()}"
        temporary.mkdir()
        try:
            with (
                WeightsFolder(base.path, base.index_digest) as old,
                WeightsFolder(written.path, written.index_digest) as new,
            ):
                num_bytes = write_delta(old, new, announced.version, version, temporary / DELTA)
            self._store.put(f"{group}/{DELTA}", temporary / DELTA)
            self._store.mark(f"{group}/{MARKER}")
        except PublishError as exc:
            # Its base is deleted, or damaged: nobody needs it for a whole version.
            log.warning("version %d is put into the store whole, as no delta can be made: %s", version, exc)
            return 0
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return num_bytes

    def _put_anchor(self, written: Written, version: int) -> None:
        group = Anchor(version, written.index_digest).group
        for file in sorted(written.path.iterdir()):
            self._store.put(f"{group}/{file.name}", file)
        self._store.mark(f"{group}/{MARKER}")
        self._anchored = version

    def _remember(self, written: Written) -> None:
        self._own.pop(written.index_digest, None)
        self._own[written.index_digest] = written
        while len(self._own) > _KEPT:
            del self._own[next(iter(self._own))]

    def _delete_old(self, version: int, announced: set[int]) -> None:
        try:
            names = listed(self._store)
            stay = kept(catalog_of(names), announced | set(self._in_use()), version)
            for group, members in _groups_up_to(version, names):
                if group not in stay:
                    self._delete(group, members)
        except (OSError, PublishError) as exc:
            # The version itself is there; what stays is deleted with the next one.
            log.warning("what nobody needs stays in trainer.delta_store, and takes room there: %s", exc)

    def _remove_unmarked(self, written: Written, version: int) -> None:
        """Delete leftovers of a killed process: incomplete, and read by no worker."""
        for folder in written.path.parent.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(folder)
        for group, members in _groups_up_to(version, listed(self._store)):
            if f"{group}/{MARKER}" not in members:
                try:
                    self._delete(group, members)
                except OSError as exc:
                    log.warning("what a killed trainer left stays in trainer.delta_store for now: %s", exc)

    def _delete(self, group: str, members: Collection[str]) -> None:
        """Delete the marker first, so that no half-deleted version counts as complete."""
        marker = f"{group}/{MARKER}"
        for name in sorted(members, key=lambda one: one != marker):
            self._store.delete(name)


def _groups_up_to(version: int, names: list[str]) -> list[tuple[str, list[str]]]:
    """Return groups that a trainer of ``version`` may delete: newer ones are its successor's, if it was stopped."""
    return [(group, members) for group, members in groups_of(names).items() if version_of(group) <= version]


def deltas_of(
    config: Config, in_use: Callable[[], Collection[int]], blocked_on: Callable[[Cause | None], None]
) -> Deltas | None:
    """Return the delta store of a run; None with another transport. Raises ConfigError.

    Args:
        blocked_on: as of ``RetriedStore``.
    """
    trainer = config.trainer
    if trainer.transport != "delta":
        return None
    return Deltas(RetriedStore(open_objects(config.delta_store), blocked_on), trainer.anchor_every, in_use)
