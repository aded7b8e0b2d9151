"""Keep proven versions in a folder that the workers of this machine share: lock, holds, room on the disk.

FOLDER/v00000042-DIGEST/    a complete version, never changed; locked shared by workers whose engine may read it
FOLDER/.making-...          a version in progress
FOLDER/.lock                held while a version is made, so that a machine makes each once (machine_lock.py)
"""

import fcntl
import logging
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from penstock.errors import PublishError
from penstock.records.causes import WeightsDiskFull, WeightsOverLimit
from penstock.system.disk import free_bytes, fsync, own_folder, remove, remove_whole
from penstock.weights.serving import is_object
from penstock.workers.weights.file_hashes import prove
from penstock.workers.weights.machine_lock import locks

log = logging.getLogger(__name__)

#: Versions that one engine may have to read: the loaded one, and the next.
HELD = 2
_MAKING, _GONE, _LOCK = ".making-", ".gone-", ".lock"


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


class VersionFolders:
    """Keep versions under ``folder``, at most ``max_bytes``, for one worker. Calls block for the disk.

    Args:
        folder: on a disk of this machine; created if missing, and closed to other users.
        limit: the configuration key of ``max_bytes``.
    """

    def __init__(
        self, folder: Path, max_bytes: int, limit: Literal["serving.max_bytes", "worker.copies_bytes"]
    ) -> None:
        self.folder, self._max_bytes, self._limit = folder, max_bytes, limit
        #: Versions that the engine may read, the last one held at the end.
        self._holds: list[Hold] = []

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
            PublishError: they exceed the limit alone, or together with versions in use, or the disk is full.
        """
        if num_bytes > self._max_bytes:
            raise self._over_limit(num_bytes, 0)
        sizes = {path: size_of(path) for path in self.by_index().values()}
        needed = num_bytes - present
        for path in list(sizes):
            if sum(sizes.values()) + num_bytes <= self._max_bytes and needed <= free_bytes(self.folder):
                return
            if self.remove(path):
                del sizes[path]
        if (used := sum(sizes.values())) + num_bytes > self._max_bytes:
            raise self._over_limit(num_bytes, used)
        if (free := free_bytes(self.folder)) < needed:
            raise PublishError(
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
            f"({self._max_bytes:,}): raise it.",
            WeightsOverLimit(self._limit, str(self.folder), num_bytes, used),
        )


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_folder(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files. Raises OSError."""
    return sum(entry.lstat().st_size for entry in folder.iterdir())
