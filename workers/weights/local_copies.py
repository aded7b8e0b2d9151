"""Make copies of versions on this machine for ``transport: delta``, before an engine is touched.

    held, without the lock:         valid copy? ─no──┐
    under the lock of this folder:  valid copy? <────┘
                                    └─no─> chain ─> anchor or copy ─> deltas ─> verify ─> rename

    COPIES/v00000042-DIGEST/    a complete version, never changed; locked shared by workers whose engine may read it
    COPIES/.making-PID-.../     a copy in progress; the next worker removes those of killed ones
    COPIES/.lock                held while a copy is made, so that a machine makes each version once (machine_lock.py)

A copy is valid if its index is the announced one and its files have their checksums. If a chain fails, the error is
logged and the next best chain is tried; the error of the last one is raised.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DiskFull, PublishError
from penstock.records.causes import Cause, WeightsOverLimit
from penstock.records.publication import Publication
from penstock.system.disk import free_bytes, fsync, is_full, own_folder, remove, remove_whole
from penstock.weights.delta_chain import DELTA, Anchor, Chain, Delta, catalog_of, find_chains
from penstock.weights.delta_format import WeightsFolder, apply_delta, checked_name
from penstock.weights.delta_store import DeltaStore
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, read_index
from penstock.workers.weights.fetched_versions import Hold, size_of
from penstock.workers.weights.file_hashes import is_whole, prove
from penstock.workers.weights.machine_lock import Stopped, alone_in, locks

log = logging.getLogger(__name__)

#: Copies that one engine may have to read: the loaded one, and the next.
HELD = 2
_MAKING, _LOCK, _COPIES = ".making-", ".lock", "v*-*"


class Fetched(NamedTuple):
    """Describe how the copy of one version was obtained."""

    path: Path
    #: Bytes fetched from the store; 0: the copy existed.
    num_bytes: int
    #: Whether an anchor was fetched.
    is_whole: bool
    num_deltas: int
    took_s: float

    @property
    def how(self) -> str:
        """Return ``whole`` (an anchor, perhaps with deltas), ``deltas`` (deltas alone) or ``here`` (it existed)."""
        return "whole" if self.is_whole else "deltas" if self.num_deltas else "here"


class LocalCopies:
    """Make copies in one folder of this machine, for one engine. Calls block for long; one thread at a time.

    Args:
        folder: on a disk of this machine; created if missing, and closed to other users. All workers of one user may
            share it.
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
        self._folder, self._store, self._max_bytes = folder, store, max_bytes
        self._stopped, self._blocked_on = stopped, blocked_on
        #: Copies that the engine may read, the last one requested at the end.
        self._holds: list[Hold] = []
        #: Outcome for the last version.
        self.last: Fetched | None = None

    def get(self, publication: Publication) -> Path:
        """Return the folder of a verified copy of ``publication``; it is kept until two others were requested.

        Raises:
            PublishError: no chain to the version, all failed, or a process that makes a copy here is stalled.
            DiskFull: the disk is full.
        """
        began = time.monotonic()
        try:
            own_folder(self._folder)
            fetched: Fetched | None = None
            with suppress(OSError, PublishError):  # it is damaged or being deleted: try again under the lock
                fetched = self._find(publication.index, repairs=False)
            if fetched is None:
                with alone_in(self._folder / _LOCK, self._blocked_on, self._stopped):
                    self._remove_leftovers()
                    fetched = self._find(publication.index, repairs=True)
                    if fetched is None:
                        fetched = self._make(publication)
                        self._hold(Hold(fetched.path))
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {publication.version} cannot be copied to {self._folder}: {exc}.") from exc
        self.last = fetched._replace(took_s=time.monotonic() - began)
        log.info("version %d copied to this machine: %s", publication.version, self.last)
        return fetched.path

    def close(self) -> None:
        """Release all copies."""
        while self._holds:
            self._holds.pop().close()

    def _hold(self, hold: Hold) -> None:
        """Hold a copy, and the one that was held before it."""
        for old in [one for one in self._holds if one.path == hold.path] or self._holds[: 1 - HELD]:
            self._holds.remove(old)
            old.close()
        self._holds.append(hold)

    def _copies(self) -> dict[str, Path]:
        """Return digest -> folder."""
        return {path.name.rpartition("-")[2]: path for path in sorted(self._folder.glob(_COPIES)) if _is_own(path)}

    def _find(self, digest: str, *, repairs: bool) -> Fetched | None:
        """Hold and return a valid copy; None: there is none, or it was damaged and removed.

        Args:
            repairs: remove a damaged copy, for a caller that has the lock; else raise PublishError.

        Raises OSError, also if the copy is being deleted.
        """
        if (path := self._copies().get(digest)) is None:
            return None
        hold = Hold(path)
        try:
            prove(path, digest)
            os.utime(path)
        except BaseException as exc:
            hold.close()
            if not repairs or not isinstance(exc, PublishError):
                raise
            log.warning("copy is damaged and made again: %s", exc)
            self._remove(path)
            return None
        self._hold(hold)
        return Fetched(path, 0, False, 0, 0.0)

    def _make(self, publication: Publication) -> Fetched:
        catalog = catalog_of(self._store.names())
        avoid: set[str] = set()
        failure = "it has neither a whole version nor a chain that leads there"
        cause: PublishError | None = None
        while True:
            chains = find_chains(catalog, publication.index, self._copies(), avoid)
            if not chains:
                raise PublishError(
                    f"version {publication.version} of {publication.model!r} cannot be made from the delta store: "
                    f"{failure}.",
                    cause.cause if cause is not None else None,
                ) from cause
            try:
                return self._make_by(chains[0], publication)
            except Stopped:
                raise
            except _Broken as broken:
                cause, failure = broken.cause, str(broken.cause).rstrip(".")
                log.warning("copy of version %d failed, trying another chain: %s", publication.version, cause)
                avoid |= {broken.group}

    def _make_by(self, chain: Chain, publication: Publication) -> Fetched:
        """Make a version by one chain; raise _Broken with the group to avoid."""
        making = self._folder / f"{_MAKING}{os.getpid()}-{publication.version:08d}"
        making.mkdir()
        num_bytes, is_local = 0, chain.start is None
        try:
            if chain.start is None:
                at = self._copies()[chain.base]
            else:
                at, num_bytes = self._fetch_anchor(chain.start, making)
            for delta in chain.deltas:
                step, fetched = self._patch(delta, at, making, is_local)
                num_bytes += fetched
                if at.parent == making:
                    shutil.rmtree(at)
                at, is_local = step, False
            path = self._folder / Anchor(publication.version, publication.index).group
            at.rename(path)
            fsync(self._folder)
            return Fetched(path, num_bytes, chain.start is not None, len(chain.deltas), 0.0)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _fetch_anchor(self, anchor: Anchor, making: Path) -> tuple[Path, int]:
        into = making / "anchor"
        into.mkdir()
        try:
            num_bytes = self._fetch(f"{anchor.group}/{INDEX_FILE}", into / INDEX_FILE, MAX_INDEX_BYTES)
            index = read_index(into, anchor.index)
            self._make_room(sum(index.sizes.values()))
            with as_publish_error(f"{anchor.group} cannot be fetched"):
                for name in index.files:
                    name = checked_name(name)
                    num_bytes += self._fetch(f"{anchor.group}/{name}", into / name, index.sizes.get(name, 0))
                prove(into, anchor.index)
                fsync(into)
        except PublishError as exc:
            self._raise_if_stopped(exc)
            raise _Broken(exc, anchor.group) from exc
        return into, num_bytes

    def _patch(self, delta: Delta, at: Path, making: Path, is_local: bool) -> tuple[Path, int]:
        """Apply a delta to a second folder; ``at``, which an engine may read, is not written."""
        file, into = making / DELTA, making / f"v{delta.version:08d}"
        into.mkdir()
        try:
            base = WeightsFolder(at, delta.base_index)
            # A delta is at most as large as its base, or it is not worth fetching.
            size = sum(base.index.sizes.values())
            self._make_room(2 * size, at)
            with as_publish_error(f"{delta.group} cannot be applied"):
                num_bytes = self._fetch(f"{delta.group}/{DELTA}", file, size + MAX_INDEX_BYTES)
                apply_delta(file, base, into, delta.index, self._stopped)
        except PublishError as exc:
            self._raise_if_stopped(exc)
            if is_local and not is_whole(at, delta.base_index):
                self._remove(at)  # the delta itself may be valid
                raise _Broken(exc, "") from exc
            raise _Broken(exc, delta.group) from exc
        file.unlink()
        return into, num_bytes

    def _fetch(self, name: str, into: Path, max_bytes: int) -> int:
        return self._store.fetch(name, into, min(max_bytes, self._max_bytes), self._stopped)

    def _raise_if_stopped(self, exc: PublishError) -> None:
        if self._stopped():
            raise Stopped(str(exc)) from exc

    def _make_room(self, num_bytes: int, base: Path | None = None) -> None:
        """Delete copies that no engine may read, oldest first, until ``num_bytes`` fit the limit and the disk."""
        copies = sorted(self._copies().values(), key=lambda path: path.stat().st_mtime)
        taken = sum(map(size_of, copies))
        for path in copies:
            if taken + num_bytes <= self._max_bytes and num_bytes <= free_bytes(self._folder):
                return
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if path != base and locks(handle):
                    taken -= size_of(path)
                    self._remove(path)
            finally:
                os.close(handle)
        if taken + num_bytes > self._max_bytes:
            raise PublishError(
                f"{self._folder} has no room for {num_bytes} bytes beside the {taken} that engines may read: "
                "raise worker.copies_bytes.",
                WeightsOverLimit("worker.copies_bytes", str(self._folder), num_bytes, taken),
            )

    def _remove(self, path: Path) -> None:
        remove_whole(path, self._folder / f"{_MAKING}{os.getpid()}-gone-{path.name}")

    def _remove_leftovers(self) -> None:
        """Delete what killed workers left; the caller holds the lock, so no other process makes a copy."""
        strays = [path for path in self._folder.glob(_COPIES) if not _is_own(path)]
        for path in [*self._folder.glob(f"{_MAKING}*"), *strays]:
            log.info("leftover removed: %s", path)
            remove(path)


class _Broken(Exception):
    """A chain failed; names the group of the store to avoid, '' if a local copy was damaged and is removed."""

    def __init__(self, cause: PublishError, group: str) -> None:
        super().__init__(str(cause))
        self.cause, self.group = cause, group


def _is_own(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()
