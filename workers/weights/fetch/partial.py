"""Hold the files of a fetch in progress, and know which of their ranges are present.

The disk has no list of present ranges: a fetch that resumes reads the bytes and checks their digests.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PublishError
from penstock.protocol.scripts import bitmap_bytes
from penstock.records.offer import Offer, Range, range_digest
from penstock.system.disk import fsync, open_plain, remove
from penstock.weights.http.blobs import FileBlob, is_file_name
from penstock.weights.index import INDEX_FILE
from penstock.workers.weights.file_hashes import prove

_CHUNK_BYTES = 4 * 1024**2


class Partial:
    """Hold the partially fetched files of an offer. Calls block for the disk. Thread-safe.

    Args:
        index: bytes of the index, if it was fetched first.

    Raises:
        PublishError: the offer has an invalid file name.
        ProtocolError: malformed offer.
        OSError: the disk is full.
    """

    def __init__(self, folder: Path, offer: Offer, index: bytes | None = None) -> None:
        self.folder = folder
        self._index = index
        self.ranges = offer.ranges()
        self._sizes = offer.sizes()
        self._range_bytes = offer.range_bytes
        self._here: set[int] = set()
        self._lock = threading.Lock()
        if strange := [name for name in self._sizes if not is_file_name(name)]:
            raise PublishError(f"version {offer.version} has a file {strange[0]!r:.100}, which is no plain name.")
        self._first = {one.file: one.number for one in reversed(self.ranges)}
        self._prepare()

    def _prepare(self) -> None:
        """Allocate the files in full, so that a full disk is detected now; find ranges left by an earlier attempt."""
        if self.folder.is_symlink():
            self.folder.unlink()  # do not delete files in its target
        is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in list(self.folder.iterdir()):
            if entry.name not in self._sizes or entry.is_symlink() or not entry.is_file():
                remove(entry)
        try:
            for name, size in self._sizes.items():
                _allocate(self.folder / name, size)
        except OSError:
            # No range was fetched yet, because that needs all files; free the disk.
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if self._index is not None:
            (self.folder / INDEX_FILE).write_bytes(self._index)
        for one in self.ranges:
            may_be_here = not is_new or (self._index is not None and one.file == INDEX_FILE)
            if not one.num_bytes or (may_be_here and _is_right(self.folder, one)):
                self._here.add(one.number)

    @property
    def missing(self) -> list[int]:
        """Return the numbers of missing ranges."""
        with self._lock:
            return [one.number for one in self.ranges if one.number not in self._here]

    @property
    def has_any(self) -> bool:
        """Return whether any range besides the index is present."""
        with self._lock:
            here = [self.ranges[number] for number in self._here]
        return any(one.num_bytes for one in here if one.file != INDEX_FILE)

    def discard(self) -> None:
        """Delete the folder. Blocks for the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def bitmap(self) -> bytes:
        """Return a bitmap of present ranges; the first is the highest bit of the first byte."""
        found = bytearray(bitmap_bytes(len(self.ranges)))
        with self._lock:
            for number in self._here:
                found[number // 8] |= 0x80 >> number % 8
        return bytes(found)

    @contextmanager
    def writing(self, one: Range) -> Iterator[Callable[[int, bytes], None]]:
        """Return a function that writes bytes of a range at an offset in it."""
        handle = os.open(self.folder / one.file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

        def write(at: int, data: bytes) -> None:
            view = memoryview(data)
            while view:
                written = os.pwrite(handle, view, one.start + at)
                at, view = at + written, view[written:]

        try:
            yield write
        finally:
            os.close(handle)

    def is_here(self, number: int) -> None:
        """Record a range that was written and verified."""
        with self._lock:
            self._here.add(number)

    def blobs(self) -> dict[str, FileBlob]:
        """Return the files, which serve their present ranges."""
        return {
            name: FileBlob(self.folder / name, size, self._has(self._first[name])) for name, size in self._sizes.items()
        }

    def _has(self, first: int) -> Callable[[int, int], bool]:
        def has(start: int, end: int) -> bool:
            numbers = range(first + start // self._range_bytes, first + (end - 1) // self._range_bytes + 1)
            with self._lock:
                return self._here.issuperset(numbers)

        return has

    def finish(self, target: Path, digest: str) -> None:
        """Verify all files by the version's index, sync them, and rename the folder to ``target``, which is new.

        Raises:
            PublishError: a file does not match the index; the folder was deleted. OSError: a disk error.
        """
        try:
            prove(self.folder, digest)
        except PublishError:
            self.discard()
            raise
        self.seal(target)

    def seal(self, target: Path) -> None:
        """Sync the folder and rename it. Raises OSError."""
        for path in (*sorted(self.folder.iterdir()), self.folder):
            fsync(path)
        self.folder.rename(target)
        fsync(target.parent)


def holds(folder: Path, offer: Offer) -> bool:
    """Return whether a folder has exactly the files of an offer, byte for byte. Blocks while it reads them.

    Raises:
        ProtocolError: malformed offer. OSError: a file cannot be read.
    """
    found = {entry.name: entry.lstat().st_size for entry in folder.iterdir() if entry.is_file()}
    return found == offer.sizes() and all(_is_right(folder, one) for one in offer.ranges())


def _is_right(folder: Path, one: Range) -> bool:
    hasher = range_digest()
    with open_plain(folder / one.file) as file:
        file.seek(one.start)
        left = one.num_bytes
        while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
            hasher.update(chunk)
            left -= len(chunk)
    return hasher.digest() == one.digest


def _allocate(path: Path, size: int) -> None:
    """Create or resize a file and allocate its space; keep its content. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(handle, size)
        if size:
            os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)
