"""A delta as a file: what it leads from and to, and its pieces, which are read from the first byte to the last.

    MAGIC | index of the target | file after file: its bytes, or its safetensors header and blocks | head | tail

The head comes last, when the sizes are known; the tail (24 bytes) says how long the head is and its XXH3-64. Nothing in
it is believed: sizes are held against the file's own, and the result against the index whose digest was announced.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.errors import ProtocolError, PublishError
from penstock.protocol.records.field_checks import bounds
from penstock.protocol.records.record import Record
from penstock.system.checksum import bytes_xxh3
from penstock.weights.deltas.blocks import KINDS, PIECE_BYTES, Block
from penstock.weights.index import MAX_INDEX_BYTES, digest, index_in

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

    Raises:
        PublishError: it is not a whole delta.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self.path = file, path
        self._size = path.stat().st_size
        self.head = self._read_head()
        self._end = self._size - TAIL.size - self._head_bytes
        self._file.seek(len(MAGIC))
        data = self.take(self.head.index_bytes)
        if digest(data) != self.head.index:
            raise _spoilt(path, "another index than it names")
        self.index_data = data
        self.index = index_in(data, str(path))

    def _read_head(self) -> DeltaHead:
        if self._size < len(MAGIC) + TAIL.size or self._file.read(len(MAGIC)) != MAGIC:
            raise _spoilt(self.path, "no delta")
        self._file.seek(self._size - TAIL.size)
        self._head_bytes, checksum, magic = TAIL.unpack(self._file.read(TAIL.size))
        room = self._size - TAIL.size - len(MAGIC)
        if magic != MAGIC or self._head_bytes > min(room, MAX_HEAD_BYTES):
            raise _spoilt(self.path, "no end of a delta")
        self._file.seek(self._size - TAIL.size - self._head_bytes)
        data = self._file.read(self._head_bytes)
        if len(data) != self._head_bytes or bytes_xxh3(data) != checksum:
            raise _spoilt(self.path, "a head with another checksum")
        try:
            return DeltaHead.from_bytes(data, str(self.path))
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc

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


def _spoilt(path: "Path | str", what: str) -> PublishError:
    return PublishError(f"{path} is not a whole delta (it has {what}): load a whole version.")
