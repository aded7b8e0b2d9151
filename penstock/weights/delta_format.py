"""Write and apply the lossless difference between two folders of weights. Knows no torch.

    MAGIC | digest of the base's index | digest of the target's index | frames

A frame is its length (4 bytes) and zstandard data. The first frame is the target's index. The frames of each of the
target's files follow in the order of the index, without those that the base has with the same checksum: one per piece
of the file. Both indices fix the order and the size of every piece, so a delta claims nothing about itself, and its
result is verified by the checksums of the announced index.

A piece is the size of an element (1, 2, 4 or 8), as one byte, and the differences of the bit patterns as unsigned
integers of that size, modulo their range: of all elements; or with 16 added to that byte, of those that changed, after
their distances from the previous one (4 bytes each). Files that the base lacks, or has with another size, are
differences to zeros. A model keeps the layout of its files until its tensors change.

SGLang's ``/pull_weights`` reads one frame per tensor, which has to be in memory, and no added or reshaped tensors.
"""

import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
import zstandard

from penstock.errors import PublishError
from penstock.system.disk import file_xxh3, fsync, open_plain
from penstock.weights.index import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    WeightsIndex,
    as_publish_error,
    digest,
    index_in,
    read_index,
)

T = TypeVar("T")

MAGIC = b"pstdelt2"
_HEAD, _LENGTH = struct.Struct("<8s16s16s"), struct.Struct("<I")
#: Bytes of a piece, a few of which are in memory at once. A multiple of every element's size.
PIECE_BYTES = 16 * 1024 * 1024
#: Level of zstandard; 3 takes a tenth more time and saves 5 %.
LEVEL = 1
#: Most memory for zstandard's window: a frame that claims more is rejected.
_WINDOW_BYTES = 2 * PIECE_BYTES
_ITEMS, _CHANGED = (1, 2, 4, 8), 16
#: Above this share of changed elements, the differences of all take less time, and no more bytes.
_MOST_CHANGED = 1 / 8


class WeightsFolder:
    """Read a complete folder of weights, from any thread. Blocks for the disk.

    Args:
        digest: announced digest of its index; a folder with another index is rejected.

    Raises:
        PublishError: the folder is missing, or is another version.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest
        self.index = read_index(path, digest)

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read exactly ``num_bytes`` of a file. Raises PublishError."""
        with as_publish_error(f"{self.path} cannot be read"), open_plain(self.path / name) as file:
            file.seek(start)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise PublishError(f"{self.path} ends within {name}: it is incomplete, publish it again.")
        return data

    def has(self, target: WeightsIndex, name: str) -> bool:
        """Return whether a file of the target is the same here."""
        return self.index.files.get(name) == target.files[name]

    def read_base(self, target: WeightsIndex, name: str, start: int, num_bytes: int) -> bytes | None:
        """Read the piece that a changed file is stored as the difference to; None: zeros. Raises PublishError."""
        is_base = self.index.sizes.get(name) == target.sizes[name]
        return self.read(name, start, num_bytes) if is_base else None


def _pieces(index: WeightsIndex, name: str) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of each piece of a file; nothing for an empty one."""
    size = index.sizes[name]
    for start in range(0, size, PIECE_BYTES):
        yield start, min(PIECE_BYTES, size - start)


def encode(before: "bytes | None", after: bytes, item_bytes: int) -> bytes:
    """Return the frame that leads from one piece to another of the same size; ``before`` None: from zeros."""
    item = item_bytes if len(after) % item_bytes == 0 else 1
    new: Any = np.frombuffer(after, f"<u{item}")
    old: Any = np.zeros_like(new) if before is None else np.frombuffer(before, new.dtype)
    at = np.flatnonzero(old != new)
    if at.size > new.size * _MOST_CHANGED:
        return _compressed(bytes([item]) + (new - old).tobytes())
    distances = np.diff(at, prepend=0).astype("<u4").tobytes()
    return _compressed(bytes([_CHANGED + item]) + distances + (new[at] - old[at]).tobytes())


def decode(frame: bytes, before: "bytes | None", num_bytes: int) -> bytes:
    """Return the new piece of ``num_bytes``. Raises PublishError on an invalid frame."""
    data = _decompressed(frame, 1 + num_bytes)
    kind = data[0] if data else 0
    item, is_all = kind % _CHANGED, kind < _CHANGED
    if item not in _ITEMS or num_bytes % item or kind // _CHANGED > 1:
        raise PublishError("A piece of a delta is of an unknown kind.")
    old: Any = np.frombuffer(bytes(num_bytes) if before is None else before, f"<u{item}")
    count = old.size if is_all else (len(data) - 1) // (4 + item)
    if len(data) != 1 + count * (item if is_all else 4 + item):
        raise PublishError("A piece of a delta has another size.")
    differences = np.frombuffer(data, old.dtype, count, offset=len(data) - count * item)
    if is_all:
        return bytes((old + differences).tobytes())
    # A distance is below 2^32 and a piece has at most PIECE_BYTES elements: the sum fits.
    at = np.cumsum(np.frombuffer(data, "<u4", count, offset=1), dtype=np.int64)
    if count and at[-1] >= old.size:
        raise PublishError("A piece of a delta changes elements after its end.")
    new = old.copy()
    new[at] += differences
    return bytes(new.tobytes())


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _decompressed(frame: bytes, max_bytes: int) -> bytes:
    """Return the content of a frame. Takes no more memory than for ``max_bytes``, whatever the frame claims.

    Raises PublishError.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(frame) as reader:
            data: bytes = reader.read(max_bytes + 1)
    except zstandard.ZstdError as exc:
        raise PublishError(f"A frame of a delta cannot be decompressed ({exc}).") from exc
    if len(data) > max_bytes:
        raise PublishError(f"A frame of a delta has more than the {max_bytes} bytes that its index allows.")
    return data


def write_delta(base: WeightsFolder, target: WeightsFolder, out: Path) -> int:
    """Write ``out``, a new file, flushed and synced; returns its bytes. Blocks for disk and processor.

    Holds a few pieces in memory.

    Raises:
        PublishError: a folder does not match its index.
        OSError: a disk operation failed; the file may be partially written.
    """
    with out.open("xb") as file:
        file.write(_HEAD.pack(MAGIC, bytes.fromhex(base.digest), bytes.fromhex(target.digest)))
        with _in_order(_encodings(base, target)) as frames:
            for frame in frames:
                file.write(_LENGTH.pack(len(frame)) + frame)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _encodings(base: WeightsFolder, target: WeightsFolder) -> Iterator[Callable[[], bytes]]:
    """Yield calls that return the frames, in any thread."""
    #: File -> size of the elements of its largest tensor.
    item_bytes = {one.file: one.item_bytes for one in sorted(target.index.entries(), key=lambda one: one.num_bytes)}

    def change(name: str, start: int, num_bytes: int) -> bytes:
        before = base.read_base(target.index, name, start, num_bytes)
        return encode(before, target.read(name, start, num_bytes), item_bytes.get(name, 1))

    yield partial(_compressed, (target.path / INDEX_FILE).read_bytes())
    for name in target.index.files:
        if not base.has(target.index, name):
            yield from (partial(change, name, *piece) for piece in _pieces(target.index, name))


def apply_delta(
    delta: Path, base: WeightsFolder, into: Path, wanted: str, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Write the delta's target into ``into``, an empty folder, and sync it. Blocks for disk and processor.

    Does not write the base. Holds a few pieces in memory. Unchanged files become hard links to the base's.

    Args:
        wanted: announced digest of the target's index.
        stopped: called for every piece; True aborts with PublishError.

    Raises:
        PublishError: the delta is incomplete, has another target or base, or a result differs from the index; discard
            ``into`` then.
        OSError: a disk write failed.
    """
    with open_plain(delta) as file:
        try:
            _apply(file, base, into, wanted, stopped)
        except PublishError as exc:
            raise PublishError(f"{delta} cannot be applied, load a complete version: {exc}") from exc


def _apply(file: BinaryIO, base: WeightsFolder, into: Path, wanted: str, stopped: Callable[[], bool]) -> None:
    magic, of_base, of_target = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size))
    if magic != MAGIC:
        raise PublishError("it is not a delta of this format.")
    if of_base.hex() != base.digest:
        raise PublishError(f"it has another base than {base.path}.")
    if of_target.hex() != wanted:
        raise PublishError("it leads to another version.")
    index_data = _decompressed(_frame(file, MAX_INDEX_BYTES), MAX_INDEX_BYTES)
    if digest(index_data) != wanted:
        raise PublishError("its index is not the announced one.")
    index = index_in(index_data, "its index")

    def patch(name: str, start: int, num_bytes: int, frame: bytes) -> bytes:
        return decode(frame, base.read_base(index, name, start, num_bytes), num_bytes)

    for name in index.files:
        if base.has(index, name):
            with as_publish_error(f"{base.path / name} cannot be read"):
                link_or_copy(base.path / name, into / name)
                checksum = file_xxh3(into / name)
        else:
            # The frames are read in order, and decoded in any thread.
            calls = (partial(patch, name, *piece, _frame(file, 1 + piece[1])) for piece in _pieces(index, name))
            checksum = _write(into / name, calls, stopped)
        if checksum != index.files[name]:
            raise PublishError(f"{name!r:.200} is not the file that its index names (its checksum differs).")
    if file.read(1):
        raise PublishError("it has more bytes than its index needs.")
    _write(into / INDEX_FILE, [lambda: index_data], stopped)
    fsync(into)


def _frame(file: BinaryIO, max_bytes: int) -> bytes:
    """Read the next frame, whose content has at most ``max_bytes``."""
    (num_bytes,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
    # Incompressible data grow by less than this.
    if num_bytes > max_bytes + max_bytes // 128 + 1024:
        raise PublishError(f"it ends early, or has a larger frame than the {max_bytes} bytes that its index allows.")
    if len(data := file.read(num_bytes)) != num_bytes:
        raise PublishError("it ends within a frame.")
    return data


def _write(path: Path, calls: Iterable[Callable[[], bytes]], stopped: Callable[[], bool]) -> int:
    """Write a file; return its checksum."""
    hasher = xxhash.xxh3_64()
    with path.open("xb") as out, _in_order(calls) as pieces:
        for piece in pieces:
            if stopped():
                raise PublishError("this worker stops.")
            hasher.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return hasher.intdigest()


@contextmanager
def _in_order(calls: Iterable[Callable[[], T]]) -> Iterator[Iterator[T]]:
    """Iterate over the results of the calls in order, running a few calls ahead. Re-raises their errors.

    The threads end with the block. A plain generator that is never closed would join them in the garbage collector,
    possibly in a starting thread that holds the lock which their shutdown needs.
    """
    # Memory bandwidth limits both directions.
    threads = max(1, min(8, len(os.sched_getaffinity(0))))
    pool = ThreadPoolExecutor(threads, "delta")

    def results() -> Iterator[T]:
        running = deque[Future[T]]()
        for call in calls:
            running.append(pool.submit(call))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)


def link_or_copy(source: Path, path: Path) -> None:
    """Hard-link a file, or write a synced copy if the file system cannot link. Raises OSError."""
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:
        with open_plain(source) as old, path.open("xb") as new:
            shutil.copyfileobj(old, new, PIECE_BYTES)
            new.flush()
            os.fsync(new.fileno())
