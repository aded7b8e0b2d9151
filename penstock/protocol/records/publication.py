"""The publication of one version of a model's weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.field_checks import pairs
from penstock.protocol.records.record import Record


def publication_id(version: int, rev: int) -> str:
    """``VERSION-REV``: the entry of the stream of weights, and under what a publication is looked up elsewhere."""
    return f"{version}-{rev}"


def is_abandoned(version: int, abandoned: Iterable[Sequence[int]]) -> bool:
    """T1: whether ``version`` is in one of the ranges (first, last) that rewinds left behind, and no longer lives."""
    return any(first <= version <= last for first, last in abandoned)


@dataclass(frozen=True, slots=True)
class Publication(Record):
    """One version of a model's weights, and where to load it from."""

    model: str
    version: int
    #: ``trainer.transport``: how workers that are ready at once may take it. The others load the folder.
    transport: str
    #: Folder with config, tokenizer, safetensors and index; '': it is still to come (``records/whole.py`` tells then).
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
    #: Of all tensors, and how long writing and proving them took: for people. 0: not known.
    num_bytes: int = 0
    write_s: float = 0.0
    #: Ranges (first, last) of versions that rewinds abandoned: an engine that holds one loads this without waiting.
    abandoned: list[list[int]] = field(default_factory=list, metadata=pairs())
    #: Digest of the index in the folder (weights/index.py), which names tensors, checksums and files; '' for none:
    #: then ``tensors`` and ``checksums`` say it here.
    index: str = ""
    #: Digest of the names, dtypes and shapes of all tensors in the order in which they travel (weights/index.py); '':
    #: not told. Who knows an index of this layout can take what is sent before the folder is there.
    layout: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its folder was there when it was announced."""
        return bool(self.path)

    @property
    def id(self) -> str:
        """``VERSION-REV``, which names this announcement of the version."""
        return publication_id(self.version, self.rev)

    def abandons(self, version: int) -> bool:
        """Whether rewinds had left ``version`` behind when this was announced (T1)."""
        return is_abandoned(version, self.abandoned)
