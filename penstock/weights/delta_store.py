"""Store anchors and deltas as immutable objects, ``GROUP/FILE`` each, in a folder or any store that fsspec knows.

A folder hard-links files of the same file system. Object stores have no rename, so a complete group is followed by its
marker (``delta_chain.py``). Only the trainer writes.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ConfigError, PublishError
from penstock.records.causes import Cause, ObjectStoreFailing
from penstock.system.disk import fsync, is_full
from penstock.system.stop import pause_s
from penstock.weights.delta_format import link_or_copy

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Most bytes of one read.
RANGE_BYTES = 8 * 1024 * 1024
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


class DeltaStore:
    """Read and write objects, and retry what fails. Calls block; they raise OSError at the end of their attempts.

    Args:
        place: a folder's path, or a URL that fsspec knows.
        blocked_on: called periodically with the cause of a pause; None at its end.

    Raises:
        ConfigError: fsspec does not know the store; it is not connected.
    """

    def __init__(
        self, place: str, retries: Retries = READER, blocked_on: Callable[[Cause | None], None] = lambda cause: None
    ) -> None:
        self._place, self._retries, self._blocked_on = place, retries, blocked_on
        self._is_folder, self._root = "://" not in place, ""
        #: None: not connected.
        self._fs: Any = None
        try:
            for part in [] if self._is_folder else place.split("::"):
                if "://" in part:
                    fsspec.get_filesystem_class(part.partition("://")[0])
        except (ImportError, ValueError) as exc:
            raise self._refused(exc) from exc

    def names(self) -> list[str]:
        """Return all names. Raises PublishError if the store does not answer."""

        def raise_unless_missing(exc: Exception) -> None:
            if not isinstance(exc, FileNotFoundError):  # a group may be deleted meanwhile
                raise exc

        def find(root: str) -> list[str]:
            self._fs.invalidate_cache()
            options = {"on_error": raise_unless_missing} if self._is_folder else {}
            found = [str(path).lstrip("/") for path in self._fs.find(root, **options)]
            return [path.removeprefix(root.lstrip("/") + "/") for path in found]

        try:
            return self._retried("", find)
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise PublishError(f"the delta store does not list what it has ({exc}): see trainer.delta_store.") from exc

    def put(self, name: str, path: Path) -> None:
        """Store the bytes of a file, replacing the rest of an interrupted attempt under that name."""

        def put(target: str) -> None:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            if self._is_folder:
                _link(path, Path(target))
            else:
                self._fs.put_file(str(path), target)

        self._retried(name, put)

    def mark(self, name: str) -> None:
        """Write an empty object, after all others of its group have reached the disk."""

        def mark(target: str) -> None:
            path = Path(target)
            if self._is_folder:
                fsync(path.parent)
            self._fs.pipe_file(target, b"")
            if self._is_folder:
                for written in (path, path.parent, path.parent.parent):
                    fsync(written)

        self._retried(name, mark)

    def delete(self, name: str) -> None:
        """Remove an object, if it exists. Not retried: the next version deletes the rest."""
        with suppress(FileNotFoundError):
            self._do(name, lambda path: self._fs.rm_file(path))
        if self._is_folder:
            with suppress(OSError):  # it has other files
                (Path(self._root) / name).parent.rmdir()

    def fetch(self, name: str, into: Path, max_bytes: int, stopped: Callable[[], bool] = lambda: False) -> int:
        """Write an object into a new file, synced; return its bytes.

        Args:
            stopped: called often; True aborts with PublishError.

        Raises:
            PublishError: the object is missing, larger than ``max_bytes``, truncated, or cannot be read.
            OSError: a disk write failed.
        """
        size = self._read(name, lambda path: int(self._fs.size(path) or 0))
        if size > max_bytes:
            raise PublishError(f"{name} has {size} bytes, more than the {max_bytes} that there is room for.")
        with into.open("xb") as out:
            while (at := out.tell()) < size:
                if stopped():
                    raise PublishError(f"{name} was not fetched completely: this worker stops.")
                out.write(self._read(name, lambda path, at=at: self._range(path, at, size)))  # type: ignore[misc]
            out.flush()
            os.fsync(out.fileno())
        return size

    def _range(self, path: str, start: int, size: int) -> bytes:
        if data := self._fs.cat_file(path, start=start, end=min(size, start + RANGE_BYTES)):
            return bytes(data)
        raise OSError(f"it ends at byte {start}")

    def _read(self, name: str, call: Callable[[str], T]) -> T:
        try:
            return self._retried(name, call)
        except FileNotFoundError as exc:
            raise PublishError(f"{name} is not in the delta store any more.") from exc
        except OSError as exc:
            raise PublishError(f"{name} cannot be fetched from the delta store: {exc}.") from exc

    def _retried(self, name: str, call: Callable[[str], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return self._do(name, call)
                except OSError as exc:
                    failures += 1
                    if failures == self._retries.attempts or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    log.warning("delta store: attempt %d failed for %s: %s", failures, name or "a list", exc)
                    end = time.monotonic() + pause_s(failures, *self._retries[1:])
                    while (left := end - time.monotonic()) > 0:
                        self._blocked_on(ObjectStoreFailing(name, str(exc)))
                        time.sleep(min(left, REPORT_S))
        finally:
            if failures:
                self._blocked_on(None)

    def _do(self, name: str, call: Callable[[str], T]) -> T:
        """Call with the object's path; connect first, also if the last call failed."""
        try:
            if self._fs is None:
                self._connect()
            return call(f"{self._root}/{name}".rstrip("/"))
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as exc:  # each store has errors of its own
            self._fs = None  # which may be what is broken
            if isinstance(exc, OSError):
                raise
            raise OSError(f"{name or 'a list'} in the object store: {exc!r}") from exc

    def _connect(self) -> None:
        # A cached instance may have lost its connection and would not reconnect.
        if self._is_folder:
            fs, root = LocalFileSystem(skip_instance_cache=True), os.path.abspath(self._place)
        else:
            try:
                fs, root = fsspec.core.url_to_fs(self._place, skip_instance_cache=True)
            except (ImportError, ValueError) as exc:
                raise self._refused(exc) from exc
        # A cached listing misses what other machines wrote.
        fs.use_listings_cache = False
        self._fs, self._root = fs, root.rstrip("/")

    def _refused(self, exc: Exception) -> ConfigError:
        return ConfigError(f"trainer.delta_store {self._place.partition('://')[0]}:// cannot be opened: {exc}.")


def _link(path: Path, target: Path) -> None:
    """Replace a file by a hard link or copy, so that no reader finds part of it. Raises OSError."""
    temporary = target.with_name(f"{_PUTTING}{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        link_or_copy(path, temporary)
        temporary.replace(target)
    finally:
        # A rename onto another name of the same file does nothing.
        temporary.unlink(missing_ok=True)
