"""The publication of one version of a model's weights, and the address at which its folder is served."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from penstock.errors import ProtocolError
from penstock.records.codec import PAIRS
from penstock.records.record import Record
from penstock.text import printable, safe_repr, utf8_safe

#: Largest version, of as many digits as a count in Redis has.
MAX_VERSION = 10**18 - 1
#: Most characters of a reason.
MAX_REASON = 4000
#: Most bytes of an order: a lone surrogate is written as six characters, no other takes more than four.
MAX_ORDER_BYTES = 6 * (MAX_REASON + len("failed  ... "))
_DONE = re.compile(rb"done ([1-9][0-9]{0,17})")
_FAILED = b"failed "


@dataclass(frozen=True, slots=True)
class Order:
    """Represent an order of a trainer's rank 0 to the other ranks during a publication; readable text in Redis.

    ``walk`` through the weights; ``done``: the version is published; ``failed``: no version is.
    """

    kind: Literal["walk", "done", "failed"]
    #: Set with ``done``, 1 to ``MAX_VERSION``.
    version: int = 0
    #: Set with ``failed``.
    reason: str = ""

    def to_text(self) -> str:
        """Return the text in Redis; the middle of a reason longer than ``MAX_REASON`` is left out."""
        if self.kind == "done":
            return f"done {self.version}"
        return f"failed {utf8_safe(self.reason, MAX_REASON)}" if self.kind == "failed" else self.kind

    @classmethod
    def from_text(cls, data: bytes, what: str) -> Self:
        """Parse an order from Redis; raise ProtocolError that begins with ``what`` if it is invalid."""
        if data == b"walk":
            return cls("walk")
        if done := _DONE.fullmatch(data):
            return cls("done", int(done[1]))
        if data.startswith(_FAILED) and len(data) <= MAX_ORDER_BYTES:
            try:
                return cls("failed", reason=printable(data.removeprefix(_FAILED).decode()))
            except UnicodeDecodeError:
                pass
        raise ProtocolError(
            f"{what} is {safe_repr(data)} in Redis, which no verb writes: stop all ranks, and find out what else does."
        )


def publication_id(version: int, rev: int) -> str:
    """Return ``VERSION-REV``: the id in the stream of weights, and in other keys of a publication."""
    return f"{version}-{rev}"


def is_abandoned(version: int, abandoned: Iterable[Sequence[int]]) -> bool:
    """Return whether ``version`` is in one of the ranges (first, last) that rewinds abandoned (T1)."""
    return any(first <= version <= last for first, last in abandoned)


@dataclass(frozen=True, slots=True)
class Publication(Record):
    """One version of a model's weights, and where to load it from."""

    model: str
    version: int
    #: ``trainer.transport``: how ready workers may receive it. The others load the folder.
    transport: str
    #: Folder with config, tokenizer, safetensors and index; '': not complete yet (see ``records/publication.py``).
    path: str
    step: int = 0
    #: Last batch that this version consumed.
    through: int = 0
    #: Announced again after every engine failed to load it.
    rev: int = 0
    published_s: float = 0.0
    #: Bytes of all tensors, and seconds to write and verify them: for views. 0: not known.
    num_bytes: int = 0
    write_s: float = 0.0
    #: Ranges (first, last) of versions that rewinds abandoned: an engine that holds one loads this without waiting.
    abandoned: list[list[int]] = field(default_factory=list, metadata=PAIRS)
    #: Digest of the index in the folder (weights/index.py), which names tensors, checksums and files; '' without one.
    index: str = ""
    #: Digest of the names, dtypes and shapes of all tensors in the order of transfer (weights/index.py); '':
    #: not known. A worker with an index of this layout can receive a transfer before the folder is complete.
    layout: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its folder was complete when it was announced."""
        return bool(self.path)

    @property
    def id(self) -> str:
        """``VERSION-REV``, the id of this announcement of the version."""
        return publication_id(self.version, self.rev)

    def abandons(self, version: int) -> bool:
        """Return whether rewinds had abandoned ``version`` when this was announced (T1)."""
        return is_abandoned(version, self.abandoned)


@dataclass(frozen=True, slots=True)
class Whole(Record):
    """A version whose folder is complete, verified and synced."""

    version: int
    #: Folder with config, tokenizer, safetensors and index.
    path: str
    #: Digest of the index in it.
    index: str
    #: Bytes of all tensors, and seconds to write and verify them: for views. 0: not known.
    num_bytes: int = 0
    write_s: float = 0.0

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """Make the record of a publication with a folder. Raises ProtocolError if it has none."""
        if not publication.is_whole or not publication.index:
            raise ProtocolError(f"Version {publication.version} of {publication.model!r} has no folder with an index.")
        return cls(publication.version, publication.path, publication.index, publication.num_bytes, publication.write_s)

    def of_publication(self, publication: Publication) -> Publication:
        """Return the publication of this version with this folder.

        Raises:
            ProtocolError: it is of another version.
        """
        if publication.version != self.version:
            raise ProtocolError(f"The folder of version {self.version} is not one of version {publication.version}.")
        if publication.is_whole:
            return publication
        return replace(publication, path=self.path, index=self.index, num_bytes=self.num_bytes, write_s=self.write_s)


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """The address of a version. What is fetched there is verified by the index that was announced."""

    #: ``http(s)://HOST:PORT``
    url: str
    version: int
    #: Digest of the version's ``weights.index``, which names all files and their sizes.
    index: str
