"""Store anchors and deltas as immutable objects, ``GROUP/FILE`` each, in a folder or any store that fsspec knows.

Object stores have no rename, so a complete group is followed by its marker (``delta_chain.py``). Only the trainer
writes.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec

from penstock.errors import ConfigError, PublishError
from penstock.records.causes import Cause, ObjectStoreFailing
from penstock.system.disk import fsync, is_full, open_plain
from penstock.system.stop import pause_s
from penstock.weights.delta_format import link_or_copy

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Most bytes of one read.
RANGE_BYTES = 8 * 1024 * 1024
#: Most names of a store; a run keeps a few hundred.
MAX_NAMES = 1_000_000
#: Interval at which a pause is reported.
REPORT_S = 0.5
#: Errors that a retry does not fix.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PUTTING = ".putting-"


class Retries(NamedTuple):
    """Attempts of each call, and the pause between two, which doubles."""

    attempts: int
    first_pause_s: float
    longest_pause_s: float


#: Of workers, which have other sources; of trainers, 90 s of pauses in total.
READER, WRITER = Retries(4, 0.2, 0.2), Retries(8, 1.0, 30.0)


class Folder:
    """Keep objects in a folder that trainer and workers share. Files of the same file system are hard-linked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        try:
            groups = [one for one in os.scandir(self._folder) if one.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        found: list[str] = []
        for group in groups:
            with suppress(FileNotFoundError):  # deleted meanwhile
                found += [f"{group.name}/{file.name}" for file in os.scandir(group.path)]
        return found

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def read(self, name: str, start: int, end: int) -> bytes:
        with open_plain(self._folder / name) as file:
            file.seek(start)
            return file.read(end - start)

    def put(self, name: str, path: Path) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_PUTTING}{target.name}")
        temporary.unlink(missing_ok=True)
        try:
            link_or_copy(path, temporary)
            temporary.replace(target)
        finally:
            # A rename onto another name of the same file does nothing.
            temporary.unlink(missing_ok=True)

    def mark(self, name: str) -> None:
        target = self._folder / name
        fsync(target.parent)
        with target.open("wb") as file:
            os.fsync(file.fileno())
        fsync(target.parent)
        fsync(self._folder)

    def delete(self, name: str) -> None:
        target = self._folder / name
        target.unlink(missing_ok=True)
        if target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()


class Remote:
    """Keep objects in an object store or file system that fsspec knows by its URL."""

    def __init__(self, url: str) -> None:
        """Check the URL without connecting. Raises ConfigError if fsspec does not know the store."""
        self._url, self._root = url, ""
        #: None: not connected.
        self._fs: Any = None
        try:
            for part in url.split("::"):
                if "://" in part:
                    fsspec.get_filesystem_class(part.partition("://")[0])
        except (ImportError, ValueError) as exc:
            raise self._refused(exc) from exc

    def _refused(self, exc: Exception) -> ConfigError:
        return ConfigError(f"trainer.delta_store {self._url.partition('://')[0]}:// cannot be opened: {exc}.")

    def _do(self, name: str, call: Callable[[Any, str], T]) -> T:
        """Call with the file system and the object's path; reconnect first if the last call failed."""
        try:
            if self._fs is None:
                # A cached instance may have lost its connection and would not reconnect.
                fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True)
                # A cached listing misses what other machines wrote.
                fs.use_listings_cache = False
                self._fs, self._root = fs, root.rstrip("/")
            return call(self._fs, f"{self._root}/{name}".rstrip("/"))
        except FileNotFoundError:
            raise
        except Exception as exc:  # each store has errors of its own
            is_connected, self._fs = self._fs is not None, None
            if isinstance(exc, OSError):
                raise
            if not is_connected and isinstance(exc, ImportError | ValueError):
                raise self._refused(exc) from exc
            raise OSError(f"{name or 'a list'} in the object store: {exc!r}") from exc

    def names(self) -> list[str]:
        def find(fs: Any, root: str) -> list[str]:
            fs.invalidate_cache()
            found = [str(path).lstrip("/") for path in fs.find(root)]
            return [path.removeprefix(root.lstrip("/") + "/") for path in found]

        try:
            return self._do("", find)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int:
        return int(self._do(name, lambda fs, path: fs.size(path)) or 0)

    def read(self, name: str, start: int, end: int) -> bytes:
        return bytes(self._do(name, lambda fs, path: fs.cat_file(path, start=start, end=end)))

    def put(self, name: str, path: Path) -> None:
        def put(fs: Any, target: str) -> None:
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)

        self._do(name, put)

    def mark(self, name: str) -> None:
        self._do(name, lambda fs, path: fs.pipe_file(path, b""))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._do(name, lambda fs, path: fs.rm_file(path))


class DeltaStore:
    """Read and write objects, and retry what fails. Calls block; they raise OSError at the end of their attempts.

    Args:
        place: a folder's path, or a URL.
        blocked_on: called periodically with the cause of a pause; None at its end.

    Raises:
        ConfigError: fsspec does not know the store.
    """

    def __init__(
        self, place: str, retries: Retries = READER, blocked_on: Callable[[Cause | None], None] = lambda cause: None
    ) -> None:
        self.objects: Folder | Remote = Remote(place) if "://" in place else Folder(Path(place))
        self._retries, self._blocked_on = retries, blocked_on

    def names(self) -> list[str]:
        """Return all names. Raises PublishError if the store does not answer, or has too many."""
        try:
            names = self._retried("", lambda: self.objects.names())
        except OSError as exc:
            raise PublishError(f"the delta store does not list what it has ({exc}): see trainer.delta_store.") from exc
        if len(names) > MAX_NAMES:
            raise PublishError(f"the delta store has {len(names)} names: give a run a place of its own.")
        return names

    def put(self, name: str, path: Path) -> None:
        """Store the bytes of a file, replacing the rest of an interrupted attempt under that name."""
        self._retried(name, lambda: self.objects.put(name, path))

    def mark(self, name: str) -> None:
        """Write an empty object, after all others of its group have reached the disk."""
        self._retried(name, lambda: self.objects.mark(name))

    def delete(self, name: str) -> None:
        """Remove an object, if it exists. Not retried: the next version deletes the rest."""
        self.objects.delete(name)

    def fetch(self, name: str, into: Path, max_bytes: int, stopped: Callable[[], bool] = lambda: False) -> int:
        """Write an object into a new file, synced; return its bytes.

        Args:
            stopped: called often; True aborts with PublishError.

        Raises:
            PublishError: the object is missing, larger than ``max_bytes``, truncated, or cannot be read.
            OSError: a disk write failed.
        """
        size = self._read(name, lambda: self.objects.size(name))
        if size > max_bytes:
            raise PublishError(f"{name} has {size} bytes, more than the {max_bytes} that there is room for.")
        with into.open("xb") as out:
            while (at := out.tell()) < size:
                if stopped():
                    raise PublishError(f"{name} was not fetched completely: this worker stops.")
                out.write(self._read(name, lambda at=at: self._range(name, at, size)))  # type: ignore[misc]
            out.flush()
            os.fsync(out.fileno())
        return size

    def _range(self, name: str, start: int, size: int) -> bytes:
        if data := self.objects.read(name, start, min(size, start + RANGE_BYTES)):
            return data
        raise OSError(f"it ends at byte {start}")

    def _read(self, name: str, call: Callable[[], T]) -> T:
        try:
            return self._retried(name, call)
        except FileNotFoundError as exc:
            raise PublishError(f"{name} is not in the delta store any more.") from exc
        except OSError as exc:
            raise PublishError(f"{name} cannot be fetched from the delta store: {exc}.") from exc

    def _retried(self, name: str, call: Callable[[], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return call()
                except OSError as exc:
                    failures += 1
                    if failures == self._retries.attempts or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    log.warning(
                        "delta store: attempt %d of %d failed for %s: %s",
                        failures,
                        self._retries.attempts,
                        name or "a list",
                        exc,
                    )
                    self._pause(failures, ObjectStoreFailing(name, str(exc)))
        finally:
            if failures:
                self._blocked_on(None)

    def _pause(self, failures: int, cause: Cause) -> None:
        end = time.monotonic() + pause_s(failures, self._retries.first_pause_s, self._retries.longest_pause_s)
        while (left := end - time.monotonic()) > 0:
            self._blocked_on(cause)
            time.sleep(min(left, REPORT_S))
