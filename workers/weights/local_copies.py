"""Make copies of versions on this machine for ``transport: delta``, before an engine is touched.

    held, without the lock:         valid copy? ─no──┐
    under the lock of this folder:  valid copy? <────┘
                                    └─no─> path ─> anchor or base ─> deltas ─> verify ─> rename

    COPIES/v00000042-DIGEST/    a complete version, never changed
    COPIES/.fetched/GROUP/      an anchor or a delta fetched over HTTP (fetch/spool.py)
    COPIES/.making-PID-.../     a copy in progress; the next worker removes those of killed ones
    COPIES/.lock                held while a copy is made, so that a machine makes each version once (machine_lock.py)
    COPIES/.holds/DIGEST        locks of copies that engines may read, which are not deleted (:class:`CopyHolds`)

A copy is valid if its index is the announced one and its files have their checksums. If a path fails, the error is
logged and the next best path is tried; the error of the last one is raised.
"""

import fcntl
import logging
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DiskFull, PublishError
from penstock.records.causes import Cause, WeightsOverLimit
from penstock.records.publication import Publication
from penstock.system.disk import free_bytes, fsync, is_full, own_file, own_folder, remove, remove_whole
from penstock.weights.deltas.apply import apply_delta, link_or_copy
from penstock.weights.deltas.chains import DELTA, Anchor, Catalog, Delta, Way, catalog_of, ways
from penstock.weights.deltas.folder import WeightsFolder, checked_name
from penstock.weights.deltas.head import MAX_HEAD_BYTES
from penstock.weights.deltas.objects import Objects, fetch, listed
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, read_index
from penstock.workers.weights.fetch.store import FETCHING, size_of
from penstock.workers.weights.file_hashes import is_whole, prove
from penstock.workers.weights.machine_lock import Stopped, alone_in, locks

log = logging.getLogger(__name__)

#: Copies that one engine may have to read: the loaded one, and the next.
HELD = 2


class CopyHolds:
    """Protect the copies that this process's engine may read from deletion, until the process ends.

    ``FOLDER/DIGEST`` is locked shared by every process that may read the copy, and exclusively to delete it. The folder
    exists and is accessible to its user alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Digest -> open file of its hold.
        self._held: OrderedDict[str, int] = OrderedDict()

    def hold(self, digest: str) -> None:
        """Hold a copy, and the one that was held before it. Raises OSError."""
        if digest not in self._held:
            handle = own_file(self.folder / digest)
            fcntl.flock(handle, fcntl.LOCK_SH)
            self._held[digest] = handle
        self._held.move_to_end(digest)
        while len(self._held) > HELD:
            os.close(self._held.popitem(last=False)[1])

    @contextmanager
    def meanwhile(self, digest: str) -> Iterator[None]:
        """Hold a copy while it is verified. Raises OSError if it is being deleted."""
        file = self.folder / digest
        handle = own_file(file)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), file.stat()):
                raise FileNotFoundError(f"{file} was deleted")
            yield
        finally:
            os.close(handle)

    @contextmanager
    def alone(self, digest: str) -> Iterator[bool]:
        """Return whether no live process holds the copy; new holds are blocked meanwhile. Raises OSError."""
        try:
            handle = own_file(self.folder / digest)
        except OSError as exc:
            if not is_full(exc):
                raise
            yield True  # on a full disk no process can create a hold
            return
        try:
            yield locks(handle)
        finally:
            os.close(handle)

    def forget(self, copies: Collection[str]) -> None:
        """Delete hold files, except those of ``copies`` and those in use. Raises OSError."""
        for file in self.folder.iterdir():
            if file.name not in copies and file.name not in self._held:
                # A hold is never a link.
                with nullcontext(True) if file.is_symlink() else self.alone(file.name) as may_go:
                    if may_go:
                        file.unlink()

    def close(self) -> None:
        """Release all holds."""
        while self._held:
            os.close(self._held.popitem()[1])


_MAKING, _LOCK, _HOLDS, _COPIES = ".making-", ".lock", ".holds", "v*-*"
#: Subfolder of objects fetched over HTTP.
FETCHED = ".fetched"


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
        objects: source of anchors and deltas; may be replaced before any call.
        max_bytes: most bytes of all copies in it, including the one in progress and objects fetched for it.
        stopped: called often; True aborts a call with PublishError.
        blocked_on: called periodically with the cause of a wait; None at its end.
    """

    def __init__(
        self,
        folder: Path,
        objects: Objects,
        max_bytes: int,
        stopped: Callable[[], bool] = lambda: False,
        blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    ) -> None:
        self._folder, self._max_bytes, self._stopped, self._blocked_on = folder, max_bytes, stopped, blocked_on
        self.objects = objects
        self._holds = CopyHolds(folder / _HOLDS)
        #: Outcome for the last version.
        self.last: Fetched | None = None

    def get(self, publication: Publication) -> Path:
        """Return the folder of a verified copy of ``publication``; it is kept until two others were requested.

        Raises:
            PublishError: no path to the version, all failed, or a process that makes a copy here is stalled.
            DiskFull: the disk is full.
        """
        began = time.monotonic()
        try:
            own_folder(self._folder)
            own_folder(self._holds.folder)
            fetched = self._held_here(publication.index)
            if fetched is None:
                with alone_in(self._folder / _LOCK, self._blocked_on, self._stopped):
                    self._remove_leftovers()
                    fetched = self._here(publication) or self._make(publication)
                    self._holds.hold(publication.index)
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {publication.version} cannot be copied to {self._folder}: {exc}.") from exc
        self.last = fetched._replace(took_s=time.monotonic() - began)
        log.info("version %d copied to this machine: %s", publication.version, self.last)
        return fetched.path

    def close(self) -> None:
        """Release all copies."""
        self._holds.close()

    def leads(self, objects: Objects, index: str) -> bool:
        """Return whether the version has a copy here or a path from ``objects``; raise PublishError if they fail."""
        with as_publish_error(f"copies in {self._folder} cannot be seen"):
            here = self._copies()
        return index in here or bool(ways(catalog_of(listed(objects)), index, here))

    def _copies(self) -> dict[str, Path]:
        """Return digest -> folder."""
        return {path.name.rpartition("-")[2]: path for path in sorted(self._folder.glob(_COPIES)) if _is_own(path)}

    def _held_here(self, digest: str) -> Fetched | None:
        """Verify and return a copy without the lock, which another process may hold; None to check again under it."""
        if (path := self._copies().get(digest)) is None:
            return None
        with suppress(OSError, PublishError), self._holds.meanwhile(digest):
            prove(path, digest)
            os.utime(path)
            self._holds.hold(digest)
            return Fetched(path, 0, False, 0, 0.0)
        return None

    def _here(self, publication: Publication) -> Fetched | None:
        path = self._copies().get(publication.index)
        if path is None:
            return None
        try:
            prove(path, publication.index)
        except PublishError as exc:
            log.warning("copy is damaged and made again: %s", exc)
            self._remove(path)
            return None
        os.utime(path)
        return Fetched(path, 0, False, 0, 0.0)

    def _make(self, publication: Publication) -> Fetched:
        catalog = catalog_of(listed(self.objects))
        avoid: set[str] = set()
        failure = "it has neither a whole version nor a chain that leads there"
        cause: PublishError | None = None
        while True:
            found = ways(catalog, publication.index, self._copies(), avoid)
            if not found:
                raise PublishError(
                    f"version {publication.version} of {publication.model!r} cannot be made from the store of deltas: "
                    f"{failure}.",
                    cause.cause if cause is not None else None,
                ) from cause
            self._delete_unneeded(catalog)
            try:
                return self._make_by(found[0], publication)
            except Stopped:
                raise
            except _Broken as broken:
                cause, failure = broken.cause, str(broken.cause).rstrip(".")
                log.warning("copy of version %d failed, trying another path: %s", publication.version, cause)
                if broken.copy is not None:
                    self._remove(broken.copy)
                avoid |= broken.groups

    def _make_by(self, way: Way, publication: Publication) -> Fetched:
        """Make a version by one path; raise _Broken with the groups or the copy to avoid."""
        making = self._folder / f"{_MAKING}{os.getpid()}-{publication.version:08d}"
        making.mkdir()
        num_bytes = 0
        try:
            if way.start is not None:
                at, fetched = self._fetch_anchor(way.start, making)
                num_bytes += fetched
            else:
                at = self._copies()[way.base]
            is_local = way.start is None
            for delta in way.deltas:
                step, fetched = self._patch(delta, at, making, is_local)
                num_bytes += fetched
                if at.parent == making:
                    shutil.rmtree(at)
                at, is_local = step, False
            path = self._folder / Anchor(publication.version, publication.index).group
            at.rename(path)
            fsync(self._folder)
            return Fetched(path, num_bytes, way.start is not None, len(way.deltas), 0.0)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _fetch_anchor(self, anchor: Anchor, making: Path) -> tuple[Path, int]:
        into = making / "anchor"
        into.mkdir()
        try:
            near = self._near(anchor.group)
            num_bytes = self._fetch(near, f"{anchor.group}/{INDEX_FILE}", into / INDEX_FILE, MAX_INDEX_BYTES)
            index = read_index(into, anchor.index)
            if near is None:
                self._make_room(sum(entry.num_bytes for entry in index.entries()))
            with as_publish_error(f"{anchor.group} cannot be taken"):
                for name in index.files:
                    num_bytes += self._fetch(near, f"{anchor.group}/{checked_name(name)}", into / name, self._max_bytes)
                prove(into, anchor.index)
                fsync(into)
        except PublishError as exc:
            self._raise_if_stopped(exc)
            raise _Broken(exc, {anchor.group}) from exc
        return into, num_bytes

    def _patch(self, delta: Delta, at: Path, making: Path, is_local: bool) -> tuple[Path, int]:
        file, into = making / DELTA, making / f"v{delta.version:08d}"
        into.mkdir()
        try:
            base = WeightsFolder(at, delta.base_index)
        except PublishError as exc:
            raise _Broken(exc, set() if is_local else {delta.group}, at if is_local else None) from exc
        with base:
            try:
                near = self._near(delta.group, at)
                # A delta is at most as large as its base.
                copies = 2 if near is None else 1
                self._make_room(copies * sum(entry.num_bytes for entry in base.entries.values()), at, near)
                with as_publish_error(f"{delta.group} cannot be applied"):
                    num_bytes = self._fetch(near, f"{delta.group}/{DELTA}", file, self._max_bytes)
                    apply_delta(file, base, into, delta.index, self._stopped)
            except PublishError as exc:
                self._raise_if_stopped(exc)
                if is_local and not is_whole(at, delta.base_index):
                    raise _Broken(exc, set(), at) from exc  # the delta itself may be valid
                raise _Broken(exc, {delta.group}) from exc
        file.unlink()
        return into, num_bytes

    def _near(self, group: str, base: Path | None = None) -> Path | None:
        """Return the local folder of a fetched group; None: read it from the store. Keeps ``base``."""
        coming = self._folder / FETCHED / f"{FETCHING}{group}"

        def room(num_bytes: int) -> None:
            if base is not None and num_bytes > (most := size_of(base) + MAX_INDEX_BYTES + MAX_HEAD_BYTES):
                raise PublishError(
                    f"{group} is offered with {num_bytes} bytes, and what changes all of its base has {most} at most."
                )
            here = size_of(coming) if coming.is_dir() else 0
            self._make_room(max(0, num_bytes - here), base, coming)

        return self.objects.near(group, room, self._stopped)

    def _fetch(self, near: Path | None, name: str, into: Path, max_bytes: int) -> int:
        if near is None:
            return fetch(self.objects, name, into, max_bytes, self._stopped)
        source = near / name.rpartition("/")[2]
        if not source.is_file() or (size := source.stat().st_size) > max_bytes:
            raise PublishError(f"{name} is not among what is offered, or larger than it may be.")
        link_or_copy(source, into)
        return size

    def _raise_if_stopped(self, exc: PublishError) -> None:
        if self._stopped():
            raise Stopped(str(exc)) from exc

    def _make_room(self, num_bytes: int, *stay: Path | None) -> None:
        """Delete fetched objects, then copies that no engine may read, oldest first, until ``num_bytes`` fit.

        Both the limit and the disk count. Paths in ``stay`` are kept.
        """
        copies = {path: digest for digest, path in self._copies().items()}
        all_ = [*_oldest_first(self._fetched()), *_oldest_first(copies)]
        taken = sum(map(size_of, all_))
        for path in all_:
            if taken + num_bytes <= self._max_bytes and num_bytes <= free_bytes(self._folder):
                return
            if path in stay:
                continue
            with self._holds.alone(copies[path]) if path in copies else nullcontext(True) as may_go:
                if may_go:
                    taken -= size_of(path)
                    self._remove(path)
        if taken + num_bytes > self._max_bytes:
            raise PublishError(
                f"{self._folder} has no room for {num_bytes} bytes beside the {taken} that engines may read: "
                "raise worker.copies_bytes.",
                WeightsOverLimit("worker.copies_bytes", str(self._folder), num_bytes, taken),
            )

    def _fetched(self) -> list[Path]:
        """Return groups fetched over HTTP, complete or partial."""
        folder = self._folder / FETCHED
        return list(folder.iterdir()) if folder.is_dir() else []

    def _delete_unneeded(self, catalog: Catalog) -> None:
        """Delete fetched groups that are no longer offered, and anchors that became copies."""
        offered = {one.group for one in catalog.anchors} | {one.group for one in catalog.deltas}
        for path in self._fetched():
            is_needed = path.name.removeprefix(FETCHING) in offered and not (self._folder / path.name).is_dir()
            if not is_needed or not _is_own(path):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        remove_whole(path, self._folder / f"{_MAKING}{os.getpid()}-gone-{path.name}")

    def _remove_leftovers(self) -> None:
        """Delete what killed workers left; the caller holds the lock, so no other process makes a copy."""
        strays = [path for path in self._folder.glob(_COPIES) if not _is_own(path)]
        for path in [*self._folder.glob(f"{_MAKING}*"), *strays]:
            log.info("leftover removed: %s", path)
            remove(path)
        self._holds.forget(self._copies())


class _Broken(Exception):
    """A path failed; names the groups of the store and the local copy to avoid."""

    def __init__(self, cause: PublishError, groups: set[str], copy: Path | None = None) -> None:
        super().__init__(str(cause))
        self.cause, self.groups, self.copy = cause, groups, copy


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.lstat().st_mtime)


def _is_own(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()
