"""The files of a version as its trainer offers them: their ranges, and the digest of each.

A range that is fetched from the trainer or from another worker is verified by this record, which comes through
Redis and never from the sender of the bytes.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.errors import ProtocolError
from penstock.records.codec import bounds
from penstock.records.record import Record

#: Most ranges of an object: this bounds the size of the peers' state, and the steps of the verbs that read it.
MAX_RANGES = 4096
#: Most files of an object.
MAX_FILES = 2048
#: Bytes of a digest.
DIGEST_BYTES = 16


class Range(NamedTuple):
    """Bytes of one file that are fetched and verified together."""

    number: int
    file: str
    #: Offset in the file, and number of bytes.
    start: int
    num_bytes: int
    digest: bytes


def range_digest(data: "bytes | memoryview" = b"") -> "hashlib.blake2b":
    """Return the hash of a range, begun with ``data``; it is resistant to collisions, since peers are not trusted."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


def range_bytes_of(sizes: list[int], least: int) -> int:
    """Return the bytes of a range, ``least`` or more, so that files of these sizes have at most ``MAX_RANGES``.

    Raises:
        ProtocolError: there are too many files.
    """
    if len(sizes) > MAX_FILES:
        raise ProtocolError(f"a version of {len(sizes)} files cannot be served: it may have {MAX_FILES}.")
    found = least
    while sum(max(1, -(-size // found)) for size in sizes) > MAX_RANGES:
        found *= 2
    return found


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """An object, and the address where its trainer serves it."""

    #: ``http(s)://HOST:PORT``
    url: str
    version: int
    #: Digest of the version's ``weights.index``; the object's name contains it.
    index: str
    range_bytes: int = field(metadata=bounds(1, 2**50))
    #: [name, bytes] of each file.
    files: list[list[Any]]
    #: Digests of all ranges end to end, file by file.
    digests: bytes

    def ranges(self) -> list[Range]:
        """Return all ranges, in order.

        Raises:
            ProtocolError: the record is invalid.
        """
        found: list[Range] = []
        for name, size in self.sizes().items():
            for start in range(0, max(size, 1), self.range_bytes):
                number = len(found)
                digest = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                found.append(Range(number, name, start, min(self.range_bytes, size - start), digest))
                if number >= MAX_RANGES:
                    raise self._refused("has too many ranges")
        if len(self.digests) != DIGEST_BYTES * len(found):
            raise self._refused(f"has {len(self.digests)} bytes of digests for {len(found)} ranges")
        return found

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by name. Raises ProtocolError."""
        found: dict[str, int] = {}
        if not 0 < len(self.files) <= MAX_FILES:
            raise self._refused(f"has {len(self.files)} files")
        for entry in self.files:
            if len(entry) != 2 or type(entry[0]) is not str or type(entry[1]) is not int or not 0 <= entry[1] < 2**50:
                raise self._refused("has an invalid entry of files")
            found[entry[0]] = entry[1]
        if len(found) != len(self.files):
            raise self._refused("names a file twice")
        return found

    def _refused(self, what: str) -> ProtocolError:
        return ProtocolError(f"The offer of version {self.version} {what}: no trainer writes it so.")
