"""Keep proven versions in a folder that the workers of this machine share: lock, holds, room on the disk.

FOLDER/v00000042-DIGEST/    a complete version, never changed; locked shared by workers whose engine may read it
FOLDER/.making-...          a version in progress
FOLDER/.lock                held while a version is made, so that a machine makes each once (machine_lock.py)
"""

import fcntl
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import DiskFull, PublishError
from penstock.records.cause import Cause
from penstock.records.publication import Publication
from penstock.records.worker_causes import WeightsDiskFull, WeightsOverLimit
from penstock.system.disk import free_bytes, fsync, is_full, locks, own_folder, remove, remove_whole
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, read_index
from penstock.weights.serving import is_object, object_name
from penstock.workers.weights.file_hashes import differing, prove
from penstock.workers.weights.machine_lock import alone_in

log = logging.getLogger(__name__)

#: Called with the cause of a wait.
Report: TypeAlias = Callable[[Cause | None], None]
#: Versions that one engine may have to read: the loaded one, and the next.
HELD = 2
#: Pause after an attempt that found the disk full, in times of what it took, and the longest one in seconds.
FULL_PAUSE, MAX_FULL_PAUSE_S = 10, 300.0
_MAKING, _GONE, _LOCK = ".making-", ".gone-", ".lock"


class NoRoom(PublishError, DiskFull):
    """A version does not fit on the disk; its cause is a ``WeightsDiskFull``."""


class Hold:
    """Protect a folder from deletion by other processes, until ``close`` or the end of this process."""

    def __init__(self, path: Path) -> None:
        """Hold a folder. Raises OSError if it does not exist, or is being deleted."""
        self.path = path
        self._handle = _opened(path)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._handle), path.lstat()):
                raise FileNotFoundError(f"{path} was deleted")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Fetched(NamedTuple):
    """Describe how one version came to this machine."""

    #: Bytes received; 0: it existed.
    num_bytes: int = 0
    #: Whether a complete version was fetched.
    is_whole: bool = False
    num_deltas: int = 0
    took_s: float = 0.0

    @property
    def how(self) -> str:
        """Return ``whole`` (perhaps with deltas), ``deltas`` (deltas alone) or ``here`` (it existed)."""
        return "whole" if self.is_whole else "deltas" if self.num_deltas else "here"


class VersionFolders(ABC):
    """Keep versions under ``folder``, at most ``max_bytes``, for one engine. Calls block; one thread at a time.

        held, without the lock:    proven version? ─no─> prepare ──┐
        under the lock:            proven version? <───────────────┘
                                   └─no─> make, by a subclass

    Args:
        folder: on a disk of this machine; created if missing, and closed to other users.
        limit: the configuration key of ``max_bytes``.
        blocked_on: called periodically with the cause of a wait; None at its end.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        limit: Literal["serving.max_bytes", "worker.copies_bytes"],
        blocked_on: Report = lambda cause: None,
    ) -> None:
        self.folder, self.max_bytes, self._limit, self.blocked_on = folder, max_bytes, limit, blocked_on
        #: Whether the running ``get`` has to end; called often.
        self.stopped: Callable[[], bool] = lambda: False
        #: How the last version came.
        self.last = Fetched()
        #: Versions that the engine may read, the last one held at the end.
        self._holds: list[Hold] = []
        #: The last error of a full disk, and until when it is raised again (monotonic, s).
        self._full: DiskFull | OSError | None = None
        self._full_until = 0.0

    def get(self, publication: Publication, stopped: Callable[[], bool] = lambda: False) -> Path:
        """Return the folder of a proven version; it is kept until two others were requested.

        Args:
            stopped: called often; True ends the call with Stopped.

        Raises:
            PublishError: it cannot be made, an engine may read a damaged one, or a process that makes one is stalled.
            DiskFull: the disk is full.
        """
        version, index = publication.version, publication.index
        if not is_object(object_name(version, index)):
            # It comes from Redis and is used as a path on this machine.
            raise PublishError(f"version {version} has an index {index!r:.100}, which is no digest: publish it again.")
        began, fetched, self.stopped = time.monotonic(), Fetched(), stopped
        try:
            path = self.find(index, repairs=False)
            if path is None:
                self.prepare(publication)
                with alone_in(self.lock_file(), self.blocked_on, stopped):
                    path = self.find(index, repairs=True)
                    if path is None:
                        path, fetched = self._make_or_pause(publication)
        except OSError as exc:
            kind = DiskFull if is_full(exc) else PublishError
            raise kind(f"version {version} cannot be kept in {self.folder}: {exc}.") from exc
        self.last = last = fetched._replace(took_s=time.monotonic() - began)
        if last.num_bytes:
            log.info(
                "version %d fetched in %.2f s: %s bytes (%s)", version, last.took_s, f"{last.num_bytes:,}", last.how
            )
        return path

    def prepare(self, publication: Publication) -> None:  # noqa: B027
        """Wait, without the lock, until the version can be made. Raises PublishError."""

    @abstractmethod
    def make(self, publication: Publication) -> tuple[Path, Fetched]:
        """Make a version, add it to the folders and return its path; the caller holds the lock.

        Raises PublishError, OSError.
        """

    def complete(self, folder: Path, index: str, fetch: Callable[[Mapping[str, int]], None]) -> None:
        """Fetch the missing files of a version into its folder, the index first; verify their hashes and sync them.

        Args:
            folder: created if missing; may have the beginnings of files.
            fetch: completes files, given with their sizes; that of the index is the most that it may have.

        Raises:
            PublishError: the index or a file is not the announced one, or ``fetch`` failed. A wrong file is deleted.
            OSError: a disk error.
        """
        if folder.is_symlink():
            folder.unlink()  # do not delete files in its target
        folder.mkdir(exist_ok=True)
        try:
            record = read_index(folder, index)  # a previous attempt may have fetched it
        except PublishError:
            (folder / INDEX_FILE).unlink(missing_ok=True)
            self._fetch_index(fetch)
            record = read_index(folder, index)
        remove_strangers(folder, {**record.sizes, INDEX_FILE: MAX_INDEX_BYTES})
        present = size_of(folder)
        self.make_room(sum(record.sizes.values()) + (folder / INDEX_FILE).stat().st_size, present)
        fetch(record.sizes)
        if wrong := differing(folder, record.files, index):
            for name in wrong:
                (folder / name).unlink()
            raise PublishError(f"{wrong[0]} does not match the index: it is fetched again.")
        for path in (*sorted(folder.iterdir()), folder):
            fsync(path)

    def _fetch_index(self, fetch: Callable[[Mapping[str, int]], None]) -> None:
        """Fetch the index; while the disk is full, delete unused versions, the oldest first, and try again."""
        versions = iter(list(self.by_index().values()))
        while True:
            try:
                return fetch({INDEX_FILE: MAX_INDEX_BYTES})
            except (DiskFull, OSError) as exc:
                if not is_full(exc) or not any(self.remove(path) for path in versions):
                    raise

    def _make_or_pause(self, publication: Publication) -> tuple[Path, Fetched]:
        """Call ``make``; after it found the disk full, raise the same error for a while.

        A quota is not known before, and the next attempt would receive everything again.
        """
        began = time.monotonic()
        if self._full is not None and began < self._full_until:
            raise self._full.with_traceback(None)
        try:
            return self.make(publication)
        except (DiskFull, OSError) as exc:
            if is_full(exc):
                now = time.monotonic()
                self._full, self._full_until = exc, now + min(MAX_FULL_PAUSE_S, FULL_PAUSE * (now - began))
            raise

    def lock_file(self) -> Path:
        """Return the file to lock while a version is made. Raises OSError if the folder is another user's."""
        own_folder(self.folder)
        return self.folder / _LOCK

    def temporary(self, name: str) -> Path:
        """Return the folder of a version while it is made."""
        return self.folder / f"{_MAKING}{name}"

    def hold(self, path: Path) -> None:
        """Hold a version, and the one that was held before it. Raises OSError if it is being deleted."""
        new = Hold(path)
        old = [one for one in self._holds if one.path != path][1 - HELD :]
        for one in self._holds:
            if one not in old:
                one.close()
        self._holds = [*old, new]

    def close(self) -> None:
        """Release all versions."""
        while self._holds:
            self._holds.pop().close()

    def by_index(self) -> dict[str, Path]:
        """Return the complete versions by the digest of their index, the oldest first."""
        paths = (path for path in sorted(self.folder.iterdir()) if is_object(path.name) and _is_folder(path))
        return {path.name.rpartition("-")[2]: path for path in paths}

    def find(self, index: str, *, repairs: bool) -> Path | None:
        """Hold and return a proven version, perhaps made under another number (a tick).

        A version that this worker holds was proven before.

        Args:
            repairs: delete a damaged version, for a caller that has the lock; else it is skipped.

        Raises:
            PublishError: it is damaged, and an engine may read it.
            OSError: a disk error, or the folder belongs to another user.
        """
        own_folder(self.folder)
        if (path := self.by_index().get(index)) is None:
            return None
        try:
            with closing(Hold(path)):
                if not any(one.path == path for one in self._holds):
                    prove(path, index)
                self.hold(path)
            return path
        except (PublishError, OSError) as exc:
            if not repairs:
                return None
            if not isinstance(exc, PublishError):
                raise
            log.warning("version is damaged and made again: %s", exc)
            if not self.remove(path):
                raise PublishError(
                    f"{path} is damaged, and an engine of this machine may read it: restart the workers that use it."
                ) from exc
        return None

    def add(self, made: Path, name: str) -> Path:
        """Rename a complete, proven and synced folder to its final name, hold it, and return it. Raises OSError."""
        path = self.folder / name
        made.rename(path)
        fsync(self.folder)
        self.hold(path)
        return path

    def make_room(self, num_bytes: int, present: int = 0) -> None:
        """Delete unused versions, the oldest first, until ``num_bytes`` fit into the limit and on the disk.

        The caller holds the lock.

        Args:
            present: bytes of them that are on the disk already.

        Raises:
            PublishError: they exceed the limit alone, or together with versions in use.
            NoRoom: the disk is full.
        """
        if num_bytes > self.max_bytes:
            raise self._over_limit(num_bytes, 0)
        sizes = {path: size_of(path) for path in self.by_index().values()}
        needed = num_bytes - present
        for path in list(sizes):
            if sum(sizes.values()) + num_bytes <= self.max_bytes and needed <= free_bytes(self.folder):
                return
            if self.remove(path):
                del sizes[path]
        if (used := sum(sizes.values())) + num_bytes > self.max_bytes:
            raise self._over_limit(num_bytes, used)
        if (free := free_bytes(self.folder)) < needed:
            raise NoRoom(
                f"{needed:,} bytes are needed, and there is no room for more than {free:,} on the disk of "
                f"{self.folder}: make room there, or set another folder.",
                WeightsDiskFull(str(self.folder), needed, free),
            )

    def remove(self, path: Path) -> bool:
        """Delete an unused folder; return whether it was deleted."""
        with suppress(OSError):
            handle = _opened(path)
            try:
                if not locks(handle):
                    return False
                remove_whole(path, path.with_name(f"{_GONE}{path.name}"))
            finally:
                os.close(handle)
        return not path.exists()

    def remove_leftovers(self, kept: str = "") -> None:
        """Delete what killed processes left, except ``temporary(kept)``; the caller holds the lock."""
        for path in self.folder.iterdir():
            is_leftover = path.name.startswith((_MAKING, _GONE)) and path != self.temporary(kept)
            if is_leftover or (path.match("v*-*") and not _is_folder(path)):
                log.info("leftover removed: %s", path)
                remove(path)

    def _over_limit(self, num_bytes: int, used: int) -> PublishError:
        return PublishError(
            f"{num_bytes:,} bytes, and the {used:,} that engines use in {self.folder}, are more than {self._limit} "
            f"({self.max_bytes:,}): raise it.",
            WeightsOverLimit(self._limit, str(self.folder), num_bytes, used),
        )


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_folder(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()


def remove_strangers(folder: Path, sizes: Mapping[str, int]) -> None:
    """Delete what cannot be the beginning of a file of such a size. Raises OSError."""
    for entry in folder.iterdir():
        if entry.is_symlink() or not entry.is_file() or entry.stat().st_size > sizes.get(entry.name, -1):
            remove(entry)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files. Raises OSError."""
    return sum(entry.lstat().st_size for entry in folder.iterdir())
