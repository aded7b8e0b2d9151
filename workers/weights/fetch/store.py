"""The folder of fetched versions of this machine, shared by its workers: locks, uses, deletion."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.causes import WeightsDiskFull, WeightsOverLimit
from penstock.system.disk import free_bytes, own_file, own_folder, remove_whole
from penstock.weights.http.blobs import is_object
from penstock.workers.weights.machine_lock import Holder, locks, telling

#: Before the name of an object that is on its way.
FETCHING = ".fetching-"
_GONE, _LOCK = ".gone-", ".lock"
#: How often one that another worker fetches is looked at.
LOOK_S = 0.1


class Hold:
    """A folder in use by this process, so that others keep it. The use ends with the process too."""

    def __init__(self, path: Path) -> None:
        """Start to use a folder. Raises OSError if it does not exist, or is being deleted."""
        self.path = path
        #: Objects that it is served as, the newest last: a tick gives the same weights another number.
        self.names: list[str] = []
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


class Store:
    """Fetched versions under ``folder``, of at most ``max_bytes``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def path(self, name: str) -> Path:
        return self.folder / name

    def of_index(self, index: str) -> list[Path]:
        """Versions that are here whole by the digest of their index, whatever their number, the newest first.

        Raises OSError where the folder cannot be had, or is another user's.
        """
        own_folder(self.folder)
        return [path for path in reversed(self._versions()) if path.name.endswith(f"-{index}")]

    def temporary(self, name: str) -> Path:
        """Return the folder of a version while it is fetched."""
        return self.folder / f"{FETCHING}{name}"

    @asynccontextmanager
    async def fetching(self, blocked_on: Callable[..., None]) -> AsyncIterator[None]:
        """One process of this machine at a time fetches; waits for the others, while they live.

        Raises:
            PublishError: the one that fetches stands still.
            OSError: the disk refuses, or the folder is another user's.
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
        """Delete what nobody uses, the oldest first, until ``name`` fits: into the bound, and on the disk.

        Blocks for the disk; under the lock.

        Raises:
            PublishError: it does not fit by itself, or beside what is used, or what else is on the disk.
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
        """Return the complete ones, the oldest first."""
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
