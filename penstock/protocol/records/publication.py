"""The publication of one version of a model's weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.field_checks import pairs
from penstock.protocol.records.record import Record


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
    #: Folder with config, tokenizer, safetensors and index; '': not complete yet (see ``records/whole.py``).
    path: str
    #: Name -> [dtype, shape] of every tensor.
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    #: File name -> XXH3-64 of its bytes.
    checksums: dict[str, int] = field(default_factory=dict)
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
    abandoned: list[list[int]] = field(default_factory=list, metadata=pairs())
    #: Digest of the index in the folder (weights/index.py), which names tensors, checksums and files; '' for none:
    #: then ``tensors`` and ``checksums`` are set.
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
