"""The publication of one version of a model's weights."""

from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.field_checks import pairs
from penstock.protocol.records.record import Record


@dataclass(frozen=True, slots=True)
class Publication(Record):
    """One version of a model's weights, and where to load it from."""

    model: str
    version: int
    #: ``trainer.transport``: how workers that are ready at once may take it. The folder is there either way.
    transport: str
    #: Folder with config, tokenizer, safetensors and index.
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
    #: Ranges (first, last) of versions that rewinds abandoned: an engine that holds one loads this without waiting.
    abandoned: list[list[int]] = field(default_factory=list, metadata=pairs())
    #: Digest of the index in the folder (weights/index.py), which names tensors, checksums and files; '' for none:
    #: then ``tensors`` and ``checksums`` say it here.
    index: str = ""
