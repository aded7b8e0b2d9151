"""The index beside published weights: name, dtype, shape and file of every tensor, checksums. Knows no torch.

A publication's record holds only the digest of this file, so it stays small for any model. The index also fixes the
order in which tensors are sent, so that trainer and workers compute the same buckets.
"""

import errno
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.errors import ProtocolError, PublishError
from penstock.records.codec import pack
from penstock.records.record import Record
from penstock.system.disk import MAX_NAME_BYTES, is_full, open_plain
from penstock.text import safe_repr

T = TypeVar("T")
INDEX_FILE = "weights.index"
#: Most dimensions of a tensor (torch's own bound), and most numbers in one.
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**49
#: Most bytes of a file.
MAX_FILE_BYTES = 2**50
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
    """List the tensors and files of a version."""

    #: [name, dtype, shape, file] of every tensor, in the order in which they are sent.
    tensors: list[list[Any]] = field(default_factory=list)
    #: File name -> XXH3-64 of its bytes, without the index itself.
    files: dict[str, int] = field(default_factory=dict)
    #: File name -> its bytes, of the same files.
    sizes: dict[str, int] = field(default_factory=dict)

    def entries(self) -> list[TensorEntry]:
        """Return the tensors. Raises PublishError if an entry is invalid."""
        return list(map(_entry, self.tensors))


def _entry(listed: list[Any]) -> TensorEntry:
    """Validate and return an untrusted entry of an index. Raises PublishError."""
    kinds = [type(one) for one in listed]
    if kinds != [str, str, list, str] or not _is_shape(listed[2]):
        raise PublishError(
            f"The index of the weights names something that is not a tensor ({safe_repr(listed)}): publish again."
        )
    name, dtype, shape, file = listed
    if dtype not in DTYPE_BYTES:
        raise PublishError(f"The index of the weights has a dtype that cannot be loaded: {safe_repr(dtype)}.")
    return TensorEntry(name, dtype, tuple(shape), file)


def _is_shape(shape: list[Any]) -> bool:
    """Return whether a tensor can have this shape. The product is bounded even if a dimension is 0."""
    return (
        len(shape) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one <= MAX_ELEMENTS for one in shape)
        and math.prod(max(1, one) for one in shape) <= MAX_ELEMENTS
    )


def index_bytes(entries: Iterable[TensorEntry], checksums: Mapping[str, int], sizes: Mapping[str, int]) -> bytes:
    """Return the bytes of an index file; ``checksums`` and ``sizes``: as in ``WeightsIndex``, in any order."""
    tensors = [list(entry) for entry in entries]
    return WeightsIndex(tensors, dict(sorted(checksums.items())), dict(sorted(sizes.items()))).to_bytes()


def digest(data: bytes) -> str:
    """Return the digest of an index's bytes, which the publication carries."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


#: Errors of this process or machine, not of the file.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@contextmanager
def as_publish_error(what: str) -> Iterator[None]:
    """Convert file system errors on weights in the block to a PublishError that begins with ``what``.

    Raises:
        PublishError: a file is missing, or cannot be read or written.
        OSError: the disk is full, or this process has no handles or memory left; other files would fail too.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _SHORT or is_full(exc):
            raise
        raise PublishError(f"{what}: {exc}.") from exc


def read_index(folder: Path, wanted: str) -> WeightsIndex:
    """Read the index in ``folder``. Blocks while it reads a small file.

    Raises PublishError: the file is missing, too large, no index, or its digest is not ``wanted``, the announced one.
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
    """Parse an index from its bytes; raise PublishError that names ``what``."""
    try:
        index = WeightsIndex.from_bytes(data, what)
    except ProtocolError as exc:
        raise PublishError(str(exc)) from exc
    for name in index.files | index.sizes:
        if not is_file_name(name) or name == INDEX_FILE:
            raise PublishError(f"{what} names a file {name!r:.100}, which has an invalid name: publish again.")
        size = index.sizes.get(name)
        if name not in index.files or type(size) is not int or not 0 <= size < MAX_FILE_BYTES:
            raise PublishError(f"{what} has no valid size of a file {name!r:.100}: publish again.")
    return index


def is_file_name(name: Any) -> bool:
    """Return whether a version may have a file of this name: no path, not hidden."""
    # A printable name has no lone surrogates and can be encoded.
    is_plain = type(name) is str and name.isprintable() and name[:1] not in ("", ".") and not {"/", "\\"} & {*name}
    return is_plain and len(name.encode()) <= MAX_NAME_BYTES


def in_buckets(entries: Iterable[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the tensors of an index as :func:`bucketed`."""
    return bucketed(entries, max_bytes, lambda entry: (entry.num_bytes, entry.item_bytes))


def bucketed(items: Iterable[T], max_bytes: int, sizes: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Yield tensors in order, in buckets of at most ``max_bytes``; a larger tensor has a bucket to itself.

    Args:
        sizes: returns the bytes of a tensor and of one element, to which it is aligned in its bucket.
    """
    bucket: list[T] = []
    filled = 0
    for item in items:
        num_bytes, item_bytes = sizes(item)
        if filled and (filled + num_bytes > max_bytes or filled % item_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += num_bytes
    if bucket:
        yield bucket


def layout_digest(layout: Iterable[tuple[str, str, Iterable[int]]]) -> str:
    """Return the digest of the tensors' names, dtypes (torch's, without ``torch.``) and shapes, in sending order."""
    return digest(pack([[name, dtype, list(shape)] for name, dtype, shape in layout]))
