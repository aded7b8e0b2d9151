"""Store anchors and deltas as immutable named objects, in a folder or an object store.

Object stores have no rename, so a complete group is followed by its marker (``chains.py``). Readers use ``Objects``.
"""

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from penstock.errors import ConfigError, PublishError
from penstock.system.disk import fsync, open_plain
from penstock.system.extras import check_installed
from penstock.weights.deltas.apply import link_or_copy

T = TypeVar("T")
#: Most bytes of one read; attempts per read, and the pause between them.
RANGE_BYTES = 8 * 1024 * 1024
TRIES, AGAIN_S = 4, 0.2
#: Most names of a store; a run keeps a few hundred.
MAX_NAMES = 1_000_000
_PUTTING = ".putting-"


class Objects(Protocol):
    """Read objects. Every call blocks, and raises OSError if the store does not answer or lacks the name."""

    def names(self) -> list[str]:
        """Return all names, ``GROUP/FILE`` each."""

    def size(self, name: str) -> int:
        """Return the bytes of an object."""

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        """Return a local folder with the files of a group, fetched if necessary; None: read them with ``open_range``.

        Args:
            room: called with the bytes about to be fetched; its errors propagate.
            stopped: called often; True aborts with PublishError.
        """

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        """Open the bytes from ``start`` to before ``end``, to be read once and closed. Fewer may be returned."""


class ObjectStore(Objects, Protocol):
    """Read and write objects, from one process. Every call blocks, and raises OSError."""

    def put(self, name: str, path: Path) -> None:
        """Store the bytes of a file, replacing the rest of an interrupted attempt under that name."""

    def mark(self, name: str) -> None:
        """Write an empty object, after all others of its group have reached the disk."""

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""


class FolderObjects:
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
            try:
                files = [file.name for file in os.scandir(group.path)]
            except FileNotFoundError:
                continue  # deleted meanwhile
            found += [f"{group.name}/{name}" for name in files]
        return found

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        return None

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        file = open_plain(self._folder / name)
        file.seek(start)
        return file

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


class FsspecObjects:
    """Keep objects in an object store or file system that fsspec knows by its URL."""

    def __init__(self, url: str) -> None:
        """Check the URL without connecting. Raises ConfigError if fsspec does not know the store."""
        self._scheme = url.partition("://")[0]
        check_installed("fsspec", f"trainer.delta_store {self._scheme}://")
        import fsspec

        self._url, self._root = url, ""
        #: None: not connected.
        self._fs: Any = None
        with self._config_errors():
            for part in url.split("::"):
                if "://" in part:
                    fsspec.get_filesystem_class(part.partition("://")[0])

    @contextmanager
    def _config_errors(self) -> Iterator[None]:
        try:
            yield
        except (ImportError, ValueError) as exc:
            raise ConfigError(f"trainer.delta_store {self._scheme}:// cannot be opened: {exc}.") from exc

    def _connect(self) -> None:
        import fsspec

        with self._config_errors():
            # A cached instance may have lost its connection and would not reconnect.
            fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True)
        # A cached listing misses what other machines wrote.
        fs.use_listings_cache = False
        self._fs, self._root = fs, root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def names(self) -> list[str]:
        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path) for path in self._fs.find(self._root)]
            except FileNotFoundError:
                return []

        found = self._do("list", find)
        root = self._root.lstrip("/") + "/"
        return [path.lstrip("/").removeprefix(root) for path in found]

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        return None

    def size(self, name: str) -> int:
        return int(self._do(name, lambda: self._fs.size(self._path(name))) or 0)

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        return io.BytesIO(self._do(name, lambda: self._fs.cat_file(self._path(name), start=start, end=end)))

    def put(self, name: str, path: Path) -> None:
        def put() -> None:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), self._path(name))

        self._do(name, put)

    def mark(self, name: str) -> None:
        self._do(name, lambda: self._fs.pipe_file(self._path(name), b""))

    def delete(self, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._do(name, delete)

    def _do(self, name: str, call: Callable[[], T]) -> T:
        try:
            if self._fs is None:
                self._connect()
            return call()
        except (ConfigError, FileNotFoundError):
            raise
        except Exception as exc:  # each store has errors of its own
            self._fs = None  # which may be what is broken
            if isinstance(exc, OSError):
                raise
            raise OSError(f"{name} in the object store: {exc!r}") from exc


def open_objects(place: str) -> ObjectStore:
    """Open the store at a folder's path or a URL that fsspec knows; raise ConfigError."""
    return FsspecObjects(place) if "://" in place else FolderObjects(Path(place))


def listed(objects: Objects) -> list[str]:
    """Return all names of the store; raise PublishError if it does not answer."""
    try:
        names = objects.names()
    except OSError as exc:
        raise PublishError(f"the store of deltas does not list what it has ({exc}): see trainer.delta_store.") from exc
    if len(names) > MAX_NAMES:
        raise PublishError(f"the store of deltas has {len(names)} names: give a run a place of its own.")
    return names


def fetch(objects: Objects, name: str, into: Path, max_bytes: int, stopped: Callable[[], bool] = lambda: False) -> int:
    """Write an object into a new file, synced; return its bytes. Blocks; failed ranges are retried.

    Raises:
        PublishError: the object is missing, larger than ``max_bytes``, or truncated.
        OSError: a disk write failed.
    """
    size = _tried(lambda: objects.size(name), name)
    if size > max_bytes:
        raise PublishError(f"{name} has {size} bytes, more than the {max_bytes} that there is room for.")
    with into.open("xb") as out:
        while (at := out.tell()) < size:
            if stopped():
                raise PublishError(f"{name} was not fetched to its end: this worker stops.")
            end = min(size, at + RANGE_BYTES)
            data = _tried(lambda at=at, end=end: _read(objects, name, at, end), name)  # type: ignore[misc]
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return size


def _read(objects: Objects, name: str, start: int, end: int) -> bytes:
    with objects.open_range(name, start, end) as stream:
        data = stream.read(end - start)
    if not data:
        raise OSError(f"it ends at byte {start}")
    return data


def _tried(call: Callable[[], T], name: str) -> T:
    left = TRIES
    while True:
        try:
            return call()
        except FileNotFoundError as exc:
            raise PublishError(f"{name} is not in the store of deltas any more.") from exc
        except OSError as exc:
            left -= 1
            if not left:
                raise PublishError(f"{name} cannot be fetched from the store of deltas: {exc}.") from exc
            time.sleep(AGAIN_S)
