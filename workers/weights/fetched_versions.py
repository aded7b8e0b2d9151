"""Manage the folder of fetched versions that the workers of this machine share: locks, holds, room on the disk."""

import asyncio
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.causes import WeightsDiskFull, WeightsOverLimit
from penstock.system.disk import free_bytes, own_file, own_folder, remove_whole
from penstock.weights.serving import is_object
from penstock.workers.weights.file_hashes import prove
from penstock.workers.weights.machine_lock import Holder, locks, telling

log = logging.getLogger(__name__)

#: Versions that one engine may have to read: the loaded one, and the next.
HELD = 2
#: Prefix of the folder of a fetch in progress.
FETCHING = ".fetching-"
_GONE, _LOCK = ".gone-", ".lock"
#: Polling interval while another worker holds the lock.
LOOK_S = 0.1


class Hold:
    """Protect a folder from deletion by other processes, until ``close`` or the end of this process."""

    def __init__(self, path: Path) -> None:
        """Hold a folder. Raises OSError if it does not exist, or is being deleted."""
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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


class FetchedVersions:
    """Keep fetched versions under ``folder``, at most ``max_bytes``, for one worker."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        #: Versions that the engine may read, the last one held at the end.
        self._holds: list[Hold] = []

    def hold(self, path: Path) -> None:
        """Hold a version, and the one that was held before it. Raises OSError if it is being deleted."""
        hold = next((one for one in self._holds if one.path == path), None) or Hold(path)
        self._holds = [*(one for one in self._holds if one is not hold), hold]
        while len(self._holds) > HELD:
            self._holds.pop(0).close()

    def close(self) -> None:
        """Release all versions."""
        while self._holds:
            self._holds.pop().close()

    def find(self, index: str, *, repairs: bool) -> Path | None:
        """Return a version fetched before, also under another number (a tick), that passes verification, and hold it.

        Blocks for the disk.

        Args:
            repairs: delete a damaged one, for a caller that holds the lock; else it is skipped.

        Raises:
            PublishError: it is damaged, and another engine may read it. OSError: a disk error.
        """
        for path in self.of_index(index):
            try:
                with closing(Hold(path)):
                    if not any(hold.path == path for hold in self._holds):
                        prove(path, index)
                    self.hold(path)
                    return path
            except (PublishError, OSError) as exc:
                if repairs:
                    log.warning("%s is fetched again: %s", path.name, exc)
                    if not self.remove(path):
                        raise
        return None

    def of_index(self, index: str) -> list[Path]:
        """Return the complete versions with this digest of their index, the newest first.

        Raises OSError if the folder cannot be created, or belongs to another user.
        """
        own_folder(self.folder)
        return [path for path in reversed(self._versions()) if path.name.endswith(f"-{index}")]

    def temporary(self, name: str) -> Path:
        """Return the folder of a version while it is fetched."""
        return self.folder / f"{FETCHING}{name}"

    @asynccontextmanager
    async def fetching(self, blocked_on: Callable[..., None]) -> AsyncIterator[None]:
        """Hold the lock for fetching; wait while another live process of this machine holds it.

        Raises:
            PublishError: the holder is stalled.
            OSError: a disk error, or the folder belongs to another user.
        """
        own_folder(self.folder)
        file = self.folder / _LOCK
        handle = own_file(file)
        holder = Holder(handle, file)
        try:
            while not locks(handle):
                blocked_on(folder=str(self.folder), process=holder.process())
                await asyncio.sleep(LOOK_S)
            with telling(handle):
                yield
        finally:
            os.close(handle)

    def make_room(self, name: str, num_bytes: int) -> None:
        """Delete unused versions, the oldest first, until ``name`` fits into the limit and on the disk.

        Blocks for the disk. The caller holds the lock.

        Raises:
            PublishError: it exceeds the limit alone, or together with versions in use, or the disk is full.
        """
        self._remove_leftovers(name)
        if num_bytes > self._max_bytes:
            raise PublishError(
                f"{name} has {num_bytes:,} bytes, more than serving.max_bytes ({self._max_bytes:,}): raise it.",
                WeightsOverLimit("serving.max_bytes", str(self.folder), num_bytes, 0),
            )
        sizes = {path: size_of(path) for path in self._versions() if path.name != name}
        needed = num_bytes - _allocated(self.temporary(name))
        for path in list(sizes):
            if sum(sizes.values()) + num_bytes <= self._max_bytes and needed <= free_bytes(self.folder):
                return
            if self.remove(path):
                del sizes[path]
        if (used := sum(sizes.values())) + num_bytes > self._max_bytes:
            raise PublishError(
                f"{name} has {num_bytes:,} bytes, and what engines use here {used:,} more: together more than "
                f"serving.max_bytes ({self._max_bytes:,}); raise it.",
                WeightsOverLimit("serving.max_bytes", str(self.folder), num_bytes, used),
            )
        if (free := free_bytes(self.folder)) < needed:
            raise PublishError(
                f"{name} needs {needed:,} bytes, and there is no room for more than {free:,} on the disk of "
                f"{self.folder}: make room there, or set serving.folder to another disk.",
                WeightsDiskFull(str(self.folder), needed, free),
            )

    def remove(self, path: Path) -> bool:
        """Delete an unused folder; return whether it was deleted."""
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not locks(handle):
                    return False
                remove_whole(path, path.with_name(f"{_GONE}{path.name}"))
            finally:
                os.close(handle)
        return not path.exists()

    def _versions(self) -> list[Path]:
        """Return the complete versions, the oldest first."""
        return sorted(path for path in self.folder.iterdir() if is_object(path.name))

    def _remove_leftovers(self, name: str) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith(_GONE) or (path.name.startswith(FETCHING) and path != self.temporary(name)):
                shutil.rmtree(path, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files. Raises OSError."""
    return sum(entry.lstat().st_size for entry in folder.iterdir())


def _allocated(folder: Path) -> int:
    """Return the bytes allocated on disk to the files of a folder; 0 if it does not exist."""
    return sum(entry.lstat().st_blocks * 512 for entry in folder.iterdir()) if folder.is_dir() else 0
