"""Serve immutable bytes of files by the names of an object and a file in it."""

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import xxhash

from penstock.errors import PublishError
from penstock.records.offer import Offer, range_bytes_of, range_digest
from penstock.system.disk import MAX_NAME_BYTES
from penstock.weights.delta_chain import Anchor
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, digest, index_in

#: Name of an object: the folder of a version, with the digest of its index, or a delta.
_OBJECT = re.compile(r"[a-z]\d{8,20}-[0-9a-f]{32}(-\d{8,20}-[0-9a-f]{32})?")


def object_name(version: int, digest: str) -> str:
    """Return the name under which a version's folder is served and stored; it has the digest of its content."""
    return Anchor(version, digest).group


def is_object(name: str) -> bool:
    return _OBJECT.fullmatch(name) is not None


def is_version(name: str) -> bool:
    """Return whether an object is the folder of a version, which has an index."""
    return is_object(name) and name.startswith("v")


def is_file_name(name: str) -> bool:
    """Return whether an object may have a file of this name: no path, not hidden."""
    # A printable name has no lone surrogates and can be encoded.
    is_plain = name.isprintable() and name[:1] not in ("", ".") and not {"/", "\\"} & {*name}
    return is_plain and len(name.encode()) <= MAX_NAME_BYTES


#: Reads ``num_bytes`` from an offset on. Blocks for the disk.
Read: TypeAlias = Callable[[int, int], bytes]


def _all_is_here(start: int, end: int) -> bool:
    return True


class FileBlob:
    """Serve a file, unless its size has changed or it became a link.

    Args:
        has: returns whether a range of its bytes is present, for a file that is still being fetched.
    """

    def __init__(self, path: Path, size: int, has: Callable[[int, int], bool] = _all_is_here) -> None:
        self.path = path
        self.size = size
        self.has = has

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """Open the file and return its reader, which works even if the file is deleted meanwhile. Raises OSError."""
        handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self.size:
                raise FileNotFoundError(f"{self.path} is not the file any more that was to be served")
            yield lambda start, num_bytes: os.pread(handle, num_bytes, start)
        finally:
            os.close(handle)


#: Bytes that never change.
AnyBlob: TypeAlias = FileBlob


def files_of(folder: Path) -> dict[str, FileBlob]:
    """Return the files of a version's folder by name. Blocks shortly.

    Raises:
        PublishError: the folder cannot be read, is empty, or has an entry that is no plain file.
    """
    try:
        found = {}
        for entry in sorted(os.scandir(folder.resolve(strict=True)), key=lambda one: one.name):
            if not entry.is_file(follow_symlinks=False) or not is_file_name(entry.name):
                raise PublishError(f"{folder} cannot be served: {entry.name!r} in it is no plain file.")
            found[entry.name] = FileBlob(Path(entry.path), entry.stat(follow_symlinks=False).st_size)
    except OSError as exc:
        raise PublishError(f"{folder} cannot be served ({exc}): publish it again.") from exc
    if not found:
        raise PublishError(f"{folder} cannot be served: it is empty; publish it again.")
    return found


class Shelf:
    """Hold the objects that are served; nothing else can be reached. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, AnyBlob]] = {}

    def put(self, name: str, files: Mapping[str, AnyBlob]) -> None:
        """Serve an object, or replace its files."""
        if not is_object(name) or not all(map(is_file_name, files)):
            raise ValueError(f"{name!r} with {sorted(files)!r} is nothing that can be served")
        with self._lock:
            self._objects[name] = dict(files)

    def remove(self, name: str) -> None:
        """Stop serving an object; readers that have opened it may continue."""
        with self._lock:
            self._objects.pop(name, None)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._objects)

    def find(self, name: str, file: str) -> AnyBlob | None:
        with self._lock:
            return self._objects.get(name, {}).get(file)


#: Bytes of one read.
_CHUNK_BYTES = 4 * 1024**2


def make_offer(
    files: Mapping[str, AnyBlob],
    *,
    url: str,
    version: int,
    index: str,
    range_bytes: int,
    is_whole: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> Offer:
    """Make the offer of an object: the digest of each range of its files. Blocks while it reads them all.

    A version is checked against its index. A delta is checked when it is applied.

    Args:
        range_bytes: least bytes of a range.
        is_whole: whether the object is a version, not a delta.
        stopped: called now and then; True aborts with PublishError.

    Raises:
        PublishError: a file cannot be read or does not match the index.
        ProtocolError: too many files.
    """
    checksums = _checksums(files, version, index) if is_whole else {}
    sizes = {name: blob.size for name, blob in files.items()}
    length = range_bytes_of(list(sizes.values()), range_bytes)
    digests = bytearray()
    for name, blob in files.items():
        whole = xxhash.xxh3_64()
        try:
            with blob.opened() as read:
                for start in range(0, max(blob.size, 1), length):
                    if stopped():
                        raise PublishError(f"version {version} is not offered: its trainer ends.")
                    digests += _digest_of(read, start, min(start + length, blob.size), whole)
        except OSError as exc:
            raise PublishError(f"version {version} is not offered: {name} cannot be read ({exc}).") from exc
        if checksums.get(name, whole.intdigest()) != whole.intdigest():
            raise PublishError(f"version {version} is not offered: {name} is not what its index says; publish again.")
    return Offer(url, version, index, length, [[name, size] for name, size in sizes.items()], bytes(digests))


def _checksums(files: Mapping[str, AnyBlob], version: int, index: str) -> Mapping[str, int]:
    """Return the XXH3-64 of each file, from the index."""
    blob = files.get(INDEX_FILE)
    try:
        if blob is None or blob.size > MAX_INDEX_BYTES:
            raise PublishError(f"version {version} is not offered: it has no {INDEX_FILE} that can be read.")
        with blob.opened() as read:
            data = read(0, blob.size)
    except OSError as exc:
        raise PublishError(f"version {version} is not offered: {INDEX_FILE} cannot be read ({exc}).") from exc
    if digest(data) != index:
        raise PublishError(f"version {version} is not offered: its {INDEX_FILE} is not the one that was announced.")
    checksums = index_in(data, f"the index of version {version}").files
    if other := {*checksums, INDEX_FILE} ^ files.keys():
        raise PublishError(
            f"version {version} is not offered: its index and its files differ by {min(other)!r}; publish again."
        )
    return checksums


def _digest_of(read: Read, start: int, end: int, whole: xxhash.xxh3_64) -> bytes:
    hasher = range_digest()
    while start < end:
        chunk = read(start, min(_CHUNK_BYTES, end - start))
        if not chunk:
            raise OSError("it became shorter")
        hasher.update(chunk)
        whole.update(chunk)
        start += len(chunk)
    return hasher.digest()
