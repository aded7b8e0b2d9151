"""Apply a delta: write the target folder and verify each tensor and file. Knows no torch."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import xxhash

from penstock.errors import PublishError
from penstock.system.checksum import file_xxh3
from penstock.system.disk import fsync, open_plain
from penstock.weights.deltas.blocks import decode
from penstock.weights.deltas.folder import (
    Place,
    WeightsFolder,
    checked_name,
    in_order,
    num_pieces,
    num_threads,
    pieces,
    places_in,
)
from penstock.weights.deltas.head import BlockClaim, DeltaFile
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import INDEX_FILE, TensorEntry
from penstock.weights.safetensors_files import header_rooms

_COPY_BYTES = 16 * 1024 * 1024


def _never() -> bool:
    return False


def apply_delta(
    delta: Path, base: WeightsFolder, into: Path, wanted: str, stopped: Callable[[], bool] = _never
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
        _Patch(DeltaFile(file, delta, wanted), base, into, stopped).run()


class _Patch:
    def __init__(self, delta: DeltaFile, base: WeightsFolder, into: Path, stopped: Callable[[], bool]) -> None:
        if delta.head.base_index != base.digest:
            raise PublishError(f"{delta.path} is no change of {base.path}: load a whole version.")
        self._delta, self._base, self._into, self._stopped = delta, base, into, stopped
        self._entries = {entry.name: entry for entry in delta.entries}
        self._rooms = header_rooms(delta.entries)

    def run(self) -> None:
        delta, what = self._delta, str(self._delta.path)
        steps = delta.head.steps(what)
        if {name for name, _, _ in steps} != delta.index.files.keys():
            raise PublishError(f"{what} has other files than its index: load a whole version.")
        for name, how, size in steps:
            path = self._into / checked_name(name)
            if how == "base":
                self._from_base(name, path)
            elif how == "bytes":
                self._write(path, name, self._bytes(size))
            else:
                self._write_tensors(path, name, size)
        delta.check_end()
        self._write(self._into / INDEX_FILE, None, iter([delta.index_data]))
        fsync(self._into)

    def _from_base(self, name: str, path: Path) -> None:
        source = self._base.path / name
        with as_publish_error(f"{source} is not what its version had"):
            link_or_copy(source, path)
            checksum = file_xxh3(path)
        if checksum != self._delta.index.files[name]:
            raise PublishError(f"{source} is not what its version had (its checksum differs): load a whole version.")

    def _bytes(self, size: int) -> Iterator[bytes]:
        while size:
            yield self._delta.take(min(size, _COPY_BYTES))
            size -= min(size, _COPY_BYTES)

    def _write_tensors(self, path: Path, name: str, size: int) -> None:
        if not 8 <= size <= 8 + self._rooms.get(name, 0):
            raise PublishError(f"{self._delta.path} has a header of {size} bytes: load a whole version.")
        header = self._delta.take(size)
        places = places_in(header, self._entries, name)
        with in_order((call for place in places for call in self._decodings(place)), num_threads()) as made:
            self._write(path, name, self._proven(header, places, made))

    def _proven(self, header: bytes, places: list[Place], made: Iterator[bytes]) -> Iterator[bytes]:
        yield header
        for place in places:
            entry, hasher = self._entries[place.name], xxhash.xxh3_64()
            for _ in pieces(place.num_bytes):
                if self._stopped():
                    raise PublishError(f"{self._delta.path} was not applied to its end: this worker stops.")
                piece = next(made)
                hasher.update(piece)
                yield piece
            if hasher.intdigest() != entry.checksum:
                raise PublishError(
                    f"{self._delta.path} makes {entry.name!r:.200} other than its version has it (its checksum "
                    "differs): load a whole version."
                )

    def _decodings(self, place: Place) -> Iterator[Callable[[], bytes]]:
        """Read the blocks of a tensor in order; yield calls that decode them in any thread."""
        entry = self._entries[place.name]
        in_base = self._base.has(entry)
        claims = self._delta.head.claims(place.name, num_pieces(place.num_bytes), str(self._delta.path))
        if not claims and not in_base and place.num_bytes:
            raise PublishError(f"{self._delta.path} lacks {place.name!r:.200}: load a whole version.")
        for number, (start, num_bytes) in enumerate(pieces(place.num_bytes)):
            if not claims:
                yield partial(self._base.read, place.name, start, num_bytes)
            else:
                yield self._decoding(entry, claims[number], start, num_bytes, in_base)

    def _decoding(
        self, entry: TensorEntry, claim: BlockClaim, start: int, num_bytes: int, in_base: bool
    ) -> Callable[[], bytes]:
        block = self._delta.block(claim)

        def make() -> bytes:
            needs_base = in_base and block.kind != "raw"
            before = self._base.read(entry.name, start, num_bytes) if needs_base else None
            return decode(block, before, num_bytes, entry.item_bytes)

        return make

    def _write(self, path: Path, name: str | None, parts: Iterator[bytes]) -> None:
        hasher = xxhash.xxh3_64()
        with path.open("xb") as out:
            for part in parts:
                hasher.update(part)
                out.write(part)
            out.flush()
            os.fsync(out.fileno())
        if name is not None and hasher.intdigest() != self._delta.index.files[name]:
            raise PublishError(f"{self._delta.path} makes another file {name} than its version has: load a whole one.")


def link_or_copy(source: Path, path: Path) -> None:
    """Hard-link a file, or write a synced copy if the file system cannot link. Raises OSError."""
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:
        with open_plain(source) as old, path.open("xb") as new:
            shutil.copyfileobj(old, new, _COPY_BYTES)
            new.flush()
            os.fsync(new.fileno())
