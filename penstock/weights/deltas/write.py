"""Write the delta from one folder of weights to another. Knows no torch."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from penstock.errors import PublishError
from penstock.system.checksum import bytes_xxh3, file_xxh3
from penstock.weights.deltas.blocks import KINDS, Block, encode
from penstock.weights.deltas.folder import WeightsFolder, checked_name, in_order, num_threads, pieces
from penstock.weights.deltas.head import MAGIC, MAX_HEAD_BYTES, TAIL, DeltaHead
from penstock.weights.index import INDEX_FILE, TensorEntry

#: Files without tensors are copied, this much at a time.
_COPY_BYTES = 16 * 1024 * 1024


def write_delta(base: WeightsFolder, target: WeightsFolder, base_version: int, version: int, out: Path) -> int:
    """Write ``out``, a new file, flushed and synced; returns its bytes. Blocks for disk and processor.

    Holds a few pieces in memory.

    Raises:
        PublishError: a folder does not match its index, or the delta's head would be too large to be read.
        OSError: a disk operation failed; the file may be partially written.
    """
    index = (target.path / INDEX_FILE).read_bytes()
    files: list[list[object]] = []
    blocks: dict[str, list[object]] = {}
    with out.open("xb") as file:
        file.write(MAGIC)
        file.write(index)
        for name in target.index.files:
            files.append(_write_file(base, target, name, file, blocks))
        head = DeltaHead(base_version, base.digest, version, target.digest, len(index), files, blocks).to_bytes()
        if len(head) > MAX_HEAD_BYTES:
            raise PublishError(f"A delta to version {version} has a head of {len(head)} bytes: publish whole versions.")
        file.write(head)
        file.write(TAIL.pack(len(head), bytes_xxh3(head), MAGIC))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _write_file(
    base: WeightsFolder, target: WeightsFolder, name: str, file: BinaryIO, blocks: dict[str, list[object]]
) -> list[object]:
    if base.index.files.get(name) == target.index.files[name]:
        return [name, "base", 0]
    if name not in target.places:
        return [name, "bytes", _copy(target, name, file)]
    header = target.headers[name]
    file.write(header)
    entries = [target.entries[place.name] for place in target.places[name]]
    changed = [entry for entry in entries if not _is_same(base, entry)]
    calls = (call for entry in changed for call in _encodings(base, target, entry))
    with in_order(calls, num_threads()) as encoded:
        for entry in changed:
            listed: list[object] = []
            for _ in pieces(entry.num_bytes):
                block = next(encoded)
                file.write(block.data)
                listed.append([KINDS.index(block.kind), block.num_changed, block.num_far, len(block.data)])
            if listed:
                blocks[entry.name] = listed
    return [name, "tensors", len(header)]


def _is_same(base: WeightsFolder, entry: TensorEntry) -> bool:
    return base.has(entry) and base.entries[entry.name].checksum == entry.checksum


def _encodings(base: WeightsFolder, target: WeightsFolder, entry: TensorEntry) -> Iterator[Callable[[], Block]]:
    in_base = base.has(entry)

    def change(start: int, num_bytes: int) -> Block:
        before = base.read(entry.name, start, num_bytes) if in_base else None
        return encode(before, target.read(entry.name, start, num_bytes), entry.item_bytes)

    for start, num_bytes in pieces(entry.num_bytes):
        yield partial(change, start, num_bytes)


def _copy(target: WeightsFolder, name: str, file: BinaryIO) -> int:
    path, copied = target.path / checked_name(name), 0
    if file_xxh3(path) != target.index.files[name]:
        raise PublishError(f"{path} is not the file that the index names (its checksum differs): publish again.")
    with path.open("rb") as source:
        while part := source.read(_COPY_BYTES):
            file.write(part)
            copied += len(part)
    return copied
