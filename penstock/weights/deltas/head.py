"""File format of a delta, read sequentially.

    MAGIC | index of the target | per file: its bytes, or its safetensors header and blocks | head | tail

The head is written last, when the sizes are known; the tail (24 bytes) has the head's length and XXH3-64. The content
is untrusted: sizes are checked against the file's own, and the result against the announced index.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.errors import ProtocolError, PublishError
from penstock.records.codec import bounds, skim
from penstock.records.record import Record
from penstock.system.checksum import bytes_xxh3
from penstock.weights.deltas.blocks import KINDS, PIECE_BYTES, Block
from penstock.weights.index import MAX_INDEX_BYTES, TensorEntry, digest, index_in

MAGIC = b"pstdelt1"
TAIL = struct.Struct("<QQ8s")
#: 1.3 TB of weights need 8 MB.
MAX_HEAD_BYTES = 60 * 1024 * 1024
_MOST = 2**62


class BlockClaim(NamedTuple):
    """Describe a block as the head lists it; unverified."""

    kind: int
    num_changed: int
    num_far: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeltaHead(Record):
    """Describe base, target, files and blocks of a delta."""

    base_version: int = field(metadata=bounds(0, _MOST))
    #: Digest of the base's index.
    base_index: str
    version: int = field(metadata=bounds(0, _MOST))
    #: Digest of the target's index, and the bytes of that index.
    index: str
    index_bytes: int = field(metadata=bounds(0, MAX_INDEX_BYTES))
    #: [name, how, bytes] of each file of the target, in order. how: ``base`` (the base's file of the same checksum,
    #: 0 bytes), ``bytes`` (a copy) or ``tensors`` (that many bytes of header, then blocks).
    files: list[list[Any]] = field(default_factory=list)
    #: Name of a changed tensor -> [kind, num_changed, num_far, bytes] of each of its pieces.
    blocks: dict[str, list[Any]] = field(default_factory=dict)

    def steps(self, what: str) -> list[tuple[str, str, int]]:
        """Validate and return ``files``; raise PublishError that names ``what``."""
        try:
            found = [(str(name), str(how), int(size)) for name, how, size in self.files]
        except (TypeError, ValueError, OverflowError) as exc:
            raise _spoilt(what, f"an invalid file entry, {exc}") from exc
        if any(how not in ("base", "bytes", "tensors") or not 0 <= size <= _MOST for _, how, size in found):
            raise _spoilt(what, "a file of an unknown kind")
        if len({name for name, _, _ in found}) != len(found):
            raise _spoilt(what, "a file twice")
        return found

    def claims(self, tensor: str, pieces: int, what: str) -> list[BlockClaim]:
        """Return the blocks of a tensor of ``pieces`` pieces; [] if it did not change. Raises PublishError."""
        listed = self.blocks.get(tensor, [])
        try:
            found = [BlockClaim(*(int(number) for number in one)) for one in listed]
        except (TypeError, ValueError, OverflowError) as exc:
            raise _spoilt(what, f"an invalid block entry, {exc}") from exc
        if found and len(found) != pieces:
            raise _spoilt(what, f"{len(found)} pieces of {tensor!r:.200}, which has {pieces}")
        for one in found:
            if not 0 <= one.kind < len(KINDS) or not 0 <= one.num_bytes <= PIECE_BYTES + 4096:
                raise _spoilt(what, "a block of an invalid kind or size")
        return found


class DeltaFile:
    """Read a delta on disk sequentially. Blocks for the disk.

    Args:
        wanted: announced digest of the target's index; it bounds the head's size before the head is parsed.

    Raises:
        PublishError: the delta is incomplete or has another target.
    """

    def __init__(self, file: BinaryIO, path: Path, wanted: str) -> None:
        self._file, self.path = file, path
        self._size = path.stat().st_size
        head = self._read_head()
        self._end = self._size - TAIL.size - len(head)
        self._file.seek(len(MAGIC))
        self.index_data = self._read_index(head, wanted)
        self.index = index_in(self.index_data, str(path))
        #: Its tensors.
        self.entries = self.index.entries()
        if len(head) > _head_room(self.index.files, self.entries):
            raise _spoilt(path, "a head of more bytes than its index needs")
        try:
            self.head = DeltaHead.from_bytes(head, str(path))
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc

    def _read_index(self, head: bytes, wanted: str) -> bytes:
        try:
            found = skim(head, ("index", "index_bytes"), str(self.path))
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        size = found.get("index_bytes")
        if found.get("index") != wanted:
            raise PublishError(f"{self.path} leads to another version than is wanted: load a whole version.")
        if type(size) is not int or not 0 <= size <= MAX_INDEX_BYTES:
            raise _spoilt(self.path, "an index of an invalid length")
        data = self.take(size)
        if digest(data) != wanted:
            raise _spoilt(self.path, "another index than it names")
        return data

    def _read_head(self) -> bytes:
        if self._size < len(MAGIC) + TAIL.size or self._file.read(len(MAGIC)) != MAGIC:
            raise _spoilt(self.path, "no delta")
        self._file.seek(self._size - TAIL.size)
        head_bytes, checksum, magic = TAIL.unpack(self._file.read(TAIL.size))
        room = self._size - TAIL.size - len(MAGIC)
        if magic != MAGIC or head_bytes > min(room, MAX_HEAD_BYTES):
            raise _spoilt(self.path, "no end of a delta")
        self._file.seek(self._size - TAIL.size - head_bytes)
        data = self._file.read(head_bytes)
        if len(data) != head_bytes or bytes_xxh3(data) != checksum:
            raise _spoilt(self.path, "a head with another checksum")
        return data

    def take(self, num_bytes: int) -> bytes:
        """Read exactly ``num_bytes``; raise PublishError if fewer are left before the head."""
        if num_bytes > self._end - self._file.tell():
            raise _spoilt(self.path, "fewer bytes than it names")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise _spoilt(self.path, "fewer bytes than it had")
        return data

    def block(self, claim: BlockClaim) -> Block:
        """Read the next block."""
        return Block(KINDS[claim.kind], claim.num_changed, claim.num_far, self.take(claim.num_bytes))

    def check_end(self) -> None:
        """Raise PublishError if bytes are left."""
        if self._file.tell() != self._end:
            raise _spoilt(self.path, "more bytes than it names")


def _head_room(files: Iterable[str], entries: Iterable[TensorEntry]) -> int:
    """Return the most bytes of the head of a delta to such an index: texts, and numbers of at most 9 bytes."""
    of_files = sum(40 + len(name.encode(errors="replace")) for name in files)
    of_blocks = sum(
        20 + len(one.name.encode(errors="replace")) + 40 * -(-one.num_bytes // PIECE_BYTES) for one in entries
    )
    return 1024 + of_files + of_blocks


def _spoilt(path: "Path | str", what: str) -> PublishError:
    return PublishError(f"{path} is not a whole delta (it has {what}): load a whole version.")
