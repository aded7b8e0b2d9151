"""A delta as a file: what it leads from and to, and its pieces, which are read from the first byte to the last.

    MAGIC | index of the target | file after file: its bytes, or its safetensors header and blocks | head | tail

The head comes last, when the sizes are known; the tail (24 bytes) says how long the head is and its XXH3-64. Nothing in
it is believed: sizes are held against the file's own, and the result against the index whose digest was announced.
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
#: Blocks of 1.3 TB are 8 MB of it.
MAX_HEAD_BYTES = 60 * 1024 * 1024
_MOST = 2**62


class BlockClaim(NamedTuple):
    """What the head says of a block."""

    kind: int
    num_changed: int
    num_far: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeltaHead(Record):
    """What a delta leads from and to."""

    base_version: int = field(metadata=bounds(0, _MOST))
    #: Digest of the base's index.
    base_index: str
    version: int = field(metadata=bounds(0, _MOST))
    #: Digest of the target's index, and how long that index is.
    index: str
    index_bytes: int = field(metadata=bounds(0, MAX_INDEX_BYTES))
    #: [name, how, bytes] of each file of the target, in order. how: ``base`` (the base's file of the same checksum,
    #: 0 bytes), ``bytes`` (as it is) or ``tensors`` (so many bytes of header, then blocks).
    files: list[list[Any]] = field(default_factory=list)
    #: Name of a tensor -> [kind, num_changed, num_far, bytes] of each of its pieces; a tensor that did not change is
    #: left out.
    blocks: dict[str, list[Any]] = field(default_factory=dict)

    def steps(self, what: str) -> list[tuple[str, str, int]]:
        """``files``, checked; raises PublishError that names ``what``."""
        try:
            found = [(str(name), str(how), int(size)) for name, how, size in self.files]
        except (TypeError, ValueError, OverflowError) as exc:
            raise _spoilt(what, f"a file that is none, {exc}") from exc
        if any(how not in ("base", "bytes", "tensors") or not 0 <= size <= _MOST for _, how, size in found):
            raise _spoilt(what, "a file that is made in no known way")
        if len({name for name, _, _ in found}) != len(found):
            raise _spoilt(what, "a file twice")
        return found

    def claims(self, tensor: str, pieces: int, what: str) -> list[BlockClaim]:
        """Blocks of a tensor of so many pieces; [] of one that did not change. Raises PublishError."""
        listed = self.blocks.get(tensor, [])
        try:
            found = [BlockClaim(*(int(number) for number in one)) for one in listed]
        except (TypeError, ValueError, OverflowError) as exc:
            raise _spoilt(what, f"a block that is none, {exc}") from exc
        if found and len(found) != pieces:
            raise _spoilt(what, f"{len(found)} pieces of {tensor!r:.200}, which has {pieces}")
        for one in found:
            if not 0 <= one.kind < len(KINDS) or not 0 <= one.num_bytes <= PIECE_BYTES + 4096:
                raise _spoilt(what, "a block of a kind or size that none has")
        return found


class DeltaFile:
    """A delta on disk, open for reading from its first byte to its last. Blocks for the disk.

    Args:
        wanted: digest of the target's index, as it was announced: the head is held to what that index needs before it
            is made.

    Raises:
        PublishError: it is not a whole delta, or leads elsewhere.
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
            raise _spoilt(self.path, "an index of a length that none has")
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
        """The next bytes, all of them; raises PublishError where there are not so many before the head."""
        if num_bytes > self._end - self._file.tell():
            raise _spoilt(self.path, "fewer bytes than it names")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise _spoilt(self.path, "fewer bytes than it had")
        return data

    def block(self, claim: BlockClaim) -> Block:
        """The next block."""
        return Block(KINDS[claim.kind], claim.num_changed, claim.num_far, self.take(claim.num_bytes))

    def check_end(self) -> None:
        """Raise PublishError where bytes are left."""
        if self._file.tell() != self._end:
            raise _spoilt(self.path, "more bytes than it names")


def _head_room(files: Iterable[str], entries: Iterable[TensorEntry]) -> int:
    """Most bytes of the head of a delta to such an index: texts, and numbers of at most 9 bytes."""
    of_files = sum(40 + len(name.encode(errors="replace")) for name in files)
    of_blocks = sum(
        20 + len(one.name.encode(errors="replace")) + 40 * -(-one.num_bytes // PIECE_BYTES) for one in entries
    )
    return 1024 + of_files + of_blocks


def _spoilt(path: "Path | str", what: str) -> PublishError:
    return PublishError(f"{path} is not a whole delta (it has {what}): load a whole version.")
