"""The index beside published weights: name, dtype, shape, checksum and file of every tensor. Knows no torch.

A publication's record stays small, whatever the model: it carries the digest of this file, and the file the rest. The
index also fixes the order in which tensors travel, and so how they are gathered into buckets: trainer and workers
compute the same buckets from the same index.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ProtocolError, PublishError
from penstock.records.codec import MOST, pack
from penstock.records.record import Record
from penstock.system.disk import open_plain
from penstock.text import safe_repr


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A file of the model's settings; empty where there is none that can be read."""
    try:
        value = json.loads(Path(folder, name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_eos_token_ids(folder: str | Path) -> frozenset[int]:
    """Ids that end an answer, from the model's config and generation config."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_config(folder, name).get("eos_token_id")
        found.update(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
    return frozenset(found)


def read_vocab_size(folder: str | Path) -> int:
    """Number of ids of a model, from its config; 0 where that does not say."""
    config = read_config(folder)
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def count_experts(config: Mapping[str, Any]) -> int:
    """Experts that a layer of a mixture chooses among, from its config.json; 0 where it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if isinstance(count := config.get(name), int) and count), 0)


INDEX_FILE = "weights.index"
#: Most dimensions of a tensor (torch's own bound), and most numbers in one.
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**49
#: A DeepSeek-sized model has 90,000 tensors, which is 10 MB.
MAX_INDEX_BYTES = 60 * 1024 * 1024

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """One tensor of a version."""

    name: str
    #: torch's name, without ``torch.``
    dtype: str
    shape: tuple[int, ...]
    #: XXH3-64 of its bytes, row by row.
    checksum: int
    #: File of the folder that holds it.
    file: str

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class WeightsIndex(Record):
    """What a version consists of."""

    #: [name, dtype, shape, checksum, file] of every tensor, in the order in which they travel.
    tensors: list[list[Any]] = field(default_factory=list)
    #: File name -> XXH3-64 of its bytes, the index itself left out.
    files: dict[str, int] = field(default_factory=dict)
    #: File name -> its bytes, of the same files.
    sizes: dict[str, int] = field(default_factory=dict)

    def entries(self) -> list[TensorEntry]:
        """The tensors. Raises PublishError on what cannot be one."""
        return list(map(_entry, self.tensors))


def _entry(listed: list[Any]) -> TensorEntry:
    """A tensor of an index, which somebody else may have written; raises PublishError."""
    kinds = [type(one) for one in listed]
    if kinds != [str, str, list, int, str] or not _is_shape(listed[2]) or not 0 <= listed[3] <= MOST:
        raise PublishError(
            f"The index of the weights names something that is not a tensor ({safe_repr(listed)}): publish again."
        )
    name, dtype, shape, checksum, file = listed
    if dtype not in DTYPE_BYTES:
        raise PublishError(f"The index of the weights has a dtype that cannot be loaded: {safe_repr(dtype)}.")
    return TensorEntry(name, dtype, tuple(shape), checksum, file)


def _is_shape(shape: list[Any]) -> bool:
    """Whether a tensor can have it. The product counts even where a dimension is 0."""
    return (
        len(shape) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one <= MAX_ELEMENTS for one in shape)
        and math.prod(max(1, one) for one in shape) <= MAX_ELEMENTS
    )


def index_bytes(entries: Iterable[TensorEntry], checksums: Mapping[str, int], sizes: Mapping[str, int]) -> bytes:
    """An index's file.

    Args:
        checksums: file name -> XXH3-64 of its bytes, in whatever order.
        sizes: file name -> its bytes, of the same files.
    """
    tensors = [list(entry) for entry in entries]
    return WeightsIndex(tensors, dict(sorted(checksums.items())), dict(sorted(sizes.items()))).to_bytes()


def digest(data: bytes) -> str:
    """Name of an index's bytes, carried by the publication."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_index(folder: Path, wanted: str) -> WeightsIndex:
    """The index in ``folder``. Blocks while it reads a small file.

    Args:
        wanted: its digest, from the publication.

    Raises:
        PublishError: it is not there, too large, not the one that was announced, or not an index.
    """
    path = folder / INDEX_FILE
    try:
        with open_plain(path) as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except (OSError, ValueError) as exc:  # a path with a NUL is the latter
        raise PublishError(f"{path} cannot be read ({exc}): the version is not whole, publish it again.") from exc
    if len(data) > MAX_INDEX_BYTES:
        raise PublishError(f"{path} has more than the {MAX_INDEX_BYTES} bytes that an index may have.")
    if digest(data) != wanted:
        raise PublishError(f"{path} is not the index that was announced (its digest differs): publish again.")
    return index_in(data, str(path))


def index_in(data: bytes, what: str) -> WeightsIndex:
    """An index out of its bytes; raises PublishError that names ``what``."""
    try:
        index = WeightsIndex.from_bytes(data, what)
    except ProtocolError as exc:
        raise PublishError(str(exc)) from exc
    if strange := [name for name in index.files if type(name) is not str or "\0" in name]:
        raise PublishError(f"{what} names a file {strange[0]!r:.100}, which none is called: publish again.")
    return index


def fits(filled: int, num_bytes: int, item_bytes: int, max_bytes: int) -> bool:
    """Whether a tensor may follow ``filled`` bytes in one bucket, where its numbers must be aligned to their size."""
    return not filled or (filled + num_bytes <= max_bytes and filled % item_bytes == 0)


def in_buckets(entries: Iterable[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """Tensors in order, gathered into buckets of at most ``max_bytes``; a larger one has a bucket to itself."""
    bucket: list[TensorEntry] = []
    filled = 0
    for entry in entries:
        if bucket and not fits(filled, entry.num_bytes, DTYPE_BYTES[entry.dtype], max_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += entry.num_bytes
    if bucket:
        yield bucket


def layout_digest(layout: Iterable[tuple[str, str, Iterable[int]]]) -> str:
    """Name of what tensors are called and how they are made, values apart, in the order in which they travel.

    Args:
        layout: name, dtype (torch's, without ``torch.``) and shape of each.
    """
    return digest(pack([[name, dtype, list(shape)] for name, dtype, shape in layout]))
