"""Read tensors of a weights folder by their positions in its files, to make or apply a delta. Knows no torch."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeVar

from penstock.errors import PublishError
from penstock.system.disk import MAX_NAME_BYTES, open_plain
from penstock.weights.deltas.blocks import PIECE_BYTES
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import TensorEntry, read_index
from penstock.weights.safetensors_files import as_safetensors, header_rooms, parse_header, take_header

T = TypeVar("T")


class Place(NamedTuple):
    """Locate a tensor in a safetensors file."""

    name: str
    #: Counted from the end of the header.
    start: int
    num_bytes: int


class WeightsFolder:
    """Open a complete folder of weights for reading. Blocks for the disk; any number of threads may read.

    Args:
        digest: announced digest of its index; a folder with another index is rejected.

    Raises:
        PublishError: the folder is missing, is another version, or its files do not match its index.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest
        self.index = read_index(path, digest)
        self.entries = {entry.name: entry for entry in self.index.entries()}
        #: File with tensors -> its header, and its tensors in the order of their bytes.
        self.headers: dict[str, bytes] = {}
        self.places: dict[str, list[Place]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._at: dict[str, tuple[int, int]] = {}
        self._stack = ExitStack()
        try:
            for name, room in header_rooms(self.entries.values()).items():
                self._open(name, room)
        except OSError as exc:
            self.close()
            raise PublishError(f"{path} cannot be read ({exc}): publish it again.") from exc
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, room: int) -> None:
        file = self._stack.enter_context(open_plain(self.path / checked_name(name)))
        self._files[name] = file
        header = take_header(file, self.path / name, room)
        self.headers[name], self.places[name] = header, places_in(header, self.entries, name)
        for place in self.places[name]:
            self._at[place.name] = (file.fileno(), len(header) + place.start)

    def has(self, entry: TensorEntry) -> bool:
        """Return whether the folder has a tensor of that name, dtype and shape."""
        own = self.entries.get(entry.name)
        return own is not None and (own.dtype, own.shape) == (entry.dtype, entry.shape)

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read exactly ``num_bytes`` of a tensor. Raises PublishError."""
        handle, at = self._at[name]
        parts: list[bytes] = []
        while num_bytes:
            with as_publish_error(f"{self.path} cannot be read"):
                part = os.pread(handle, num_bytes, at + start)
            if not part:
                raise PublishError(f"{self.path} ends within {name}: it is not whole, publish it again.")
            parts.append(part)
            start, num_bytes = start + len(part), num_bytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked_name(name: str) -> str:
    """Return the name if it is a plain file name inside a folder; raise PublishError otherwise."""
    if not name or Path(name).name != name or name in (".", "..") or "\0" in name or _is_long(name):
        raise PublishError(f"The index of the weights names a file {name!r:.100} outside its folder: publish again.")
    return name


def _is_long(name: str) -> bool:
    return len(name.encode(errors="replace")) > MAX_NAME_BYTES


def places_in(header: bytes, entries: dict[str, TensorEntry], file: str) -> list[Place]:
    """Return the tensors in the order of their bytes, from a safetensors header that begins with its length.

    Raises:
        PublishError: invalid header, or its tensors are not those that the index lists in ``file``.
    """
    wanted = {name for name, entry in entries.items() if entry.file == file}
    found: list[Place] = []
    for name, info in parse_header(header, file).items():
        entry = entries.get(name)
        if entry is None or entry.file != file or info.end - info.start != entry.num_bytes:
            raise PublishError(f"{file} does not hold {name!r:.200} as the index says: publish it again.")
        if info.dtype != as_safetensors(entry.dtype) or info.shape != entry.shape:
            raise PublishError(f"{file} holds {name!r:.200} of another kind than the index says: publish it again.")
        found.append(Place(name, info.start, entry.num_bytes))
    if len(found) != len(wanted):
        raise PublishError(f"{file} lacks tensors that the index of the weights has there: publish it again.")
    return found


def pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of each piece of a tensor; nothing for an empty one."""
    for start in range(0, num_bytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, num_bytes - start)


def num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)


@contextmanager
def in_order(calls: Iterable[Callable[[], T]], threads: int) -> Iterator[Iterator[T]]:
    """Iterate over the results of the calls in order, running a few calls ahead. Re-raises their errors.

    The threads end with the block. A plain generator that is never closed would join them in the garbage collector,
    possibly in a starting thread that holds the lock which their shutdown needs.
    """
    left = iter(calls)
    with ThreadPoolExecutor(threads, "delta") as pool:
        running: list[Future[T]] = [pool.submit(call) for call in islice(left, threads + 1)]

        def results() -> Iterator[T]:
            while running:
                yield running.pop(0).result()
                running.extend(pool.submit(call) for call in islice(left, 1))

        try:
            yield results()
        finally:
            for one in running:
                one.cancel()


def num_threads() -> int:
    """Return the number of threads to make or apply a delta; memory bandwidth limits both."""
    return max(1, min(8, len(os.sched_getaffinity(0))))
