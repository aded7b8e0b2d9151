"""Copy a version's weights to memory, from which they are sent and their folder is written.

    source ─walk─> arena: pieces of memory that later versions reuse ─> Copy, a source of its own

A copy is immutable until its arena is reused. Concurrent readers (over HTTP) read a piece at a time, and get an error
once the copy is gone.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from penstock.consumers.weights.finite_check import FiniteCheck
from penstock.consumers.weights.http.serving import CopyFiles
from penstock.consumers.weights.publish import companions, layout_of, parts_of, require_config
from penstock.consumers.weights.sources import Source, buckets, dtype_name
from penstock.errors import PublishError
from penstock.records.publication import Copied
from penstock.redis.control import Control
from penstock.system.checksum import bytes_xxh3
from penstock.weights.http.blobs import AnyBlob, BufferBlob
from penstock.weights.index import INDEX_FILE, TensorEntry, digest, index_bytes, layout_digest
from penstock.weights.safetensors_files import FILES_JSON, file_names, files_json, order_of

log = logging.getLogger(__name__)

#: Memory is allocated in pieces of this size, a power of two, because torch rounds pinned memory up to one; a larger
#: tensor has a piece of its own.
PIECE_BYTES = 256 * 1024**2
#: Alignment of tensors.
ALIGN_BYTES = 64


class Copy:
    """Hold the weights of one version in host memory."""

    is_sharded = False

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._reading = threading.Lock()
        #: Whether its memory was reused.
        self.is_gone = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the copy unchanged within the block; a later copy waits. Raises OSError if it is gone."""
        with self._reading:
            if self.is_gone:
                raise FileNotFoundError("the trainer has taken its memory for a later version")
            yield

    def leave(self) -> None:
        """Mark the copy as gone. Blocks while a reader is inside ``kept``."""
        with self._reading:
            self.is_gone = True

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors as a ``Source``; they are read-only."""
        yield from self._tensors

    @property
    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype (torch's, without ``torch.``) and shape of each tensor, in the order they are sent."""
        return [(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in self._tensors]

    @property
    def layout_digest(self) -> str:
        """Return the identifier of this layout for workers."""
        return layout_digest(self.layout)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._tensors)


class Arena:
    """Allocate and reuse the memory of one copy. Not thread-safe."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        #: The current copy.
        self.copy: Copy | None = None

    def take(self, source: Source, config: Mapping[str, Any]) -> Copy:
        """Copy a source's tensors, replacing the previous copy.

        Blocks for the other ranks of a sharded source; after a failure too, as they take part in the walk.

        Raises:
            WeightsNotFinite: a tensor holds NaN or Inf.
            PublishError: no tensor, a duplicate name, or not enough memory.
        """
        if self.copy is not None:
            self.copy.leave()
        self.copy = None
        found: list[tuple[str, Tensor]] = []
        failure, check = None, FiniteCheck()
        places, devices = _Places(self._pieces), set()
        for bucket in buckets(source, config, PIECE_BYTES):
            for name, tensor in bucket if failure is None else ():
                try:
                    place = places.of(tensor)
                    check.copy(name, tensor.detach(), place)
                except (RuntimeError, MemoryError, OSError) as exc:
                    failure = exc
                    break
                found.append((name, place))
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        if failure is not None:
            raise PublishError(f"The weights cannot be copied into memory ({failure}): there must be room for two.")
        if not found:
            raise PublishError("there is no tensor to publish; give the model or its state dict.")
        check.raise_if_not_finite()
        self.copy = Copy(found)
        return self.copy


class _Places:
    """Return consecutive places for tensors; reuse existing pieces before new ones are allocated."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self._pieces = pieces
        self._piece, self._filled = 0, 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return contiguous memory of the shape and dtype of ``tensor``."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._piece < len(self._pieces) and self._filled + num_bytes > self._pieces[self._piece].numel():
            self._piece, self._filled = self._piece + (self._filled > 0), 0
        if self._piece == len(self._pieces):
            self._pieces.append(_allocate(max(PIECE_BYTES, num_bytes), is_pinned=tensor.is_cuda))
        elif self._pieces[self._piece].numel() < num_bytes:
            self._pieces[self._piece] = _allocate(num_bytes, is_pinned=tensor.is_cuda)
        start = self._filled
        self._filled += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        flat = self._pieces[self._piece][start : start + num_bytes]
        return flat.view(tensor.dtype).view(tensor.shape)


def _allocate(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return [num_bytes] of host memory; pinned if requested and possible."""
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:
            log.warning("copies of weights use pageable memory, which is slower: %s", exc)
    return torch.empty(num_bytes, dtype=torch.uint8)


#: Bytes read per hold of a copy, which delays a later copy.
_CHUNK_BYTES = 4 * 1024**2


class ServedCopy:
    """Serve a copy of an announced version until its folder is complete (``http/serving.py``).

    Its files are those that the folder will have, byte for byte.

    Args:
        model, max_bucket_bytes: as of ``files_of_copy``.
        tell: announces it to workers by the given connection; returns whether they may fetch it.
    """

    def __init__(
        self, version: int, copy: Copy, model: Path, max_bucket_bytes: int, tell: Callable[[Control, Copied], bool]
    ) -> None:
        self.version = version
        self._copy, self._model, self._max_bucket_bytes, self._tell = copy, model, max_bucket_bytes, tell

    @property
    def is_gone(self) -> bool:
        """Return whether its memory was reused."""
        return self._copy.is_gone

    def files(self) -> CopyFiles:
        """Return the files, see ``files_of_copy``."""
        return files_of_copy(self._copy, self._model, self._max_bucket_bytes)

    def tell(self, control: Control, index: str) -> bool:
        """Announce it to workers; return whether they may fetch it. Blocks for a round trip."""
        return self._tell(control, Copied(self.version, index))


def files_of_copy(copy: Copy, model: Path, max_bucket_bytes: int) -> CopyFiles:
    """Return the files that ``write_weights`` makes of a copy. Blocks while it reads all of it once.

    Tensor files read the copy a piece at a time; the digest of the index identifies the version.

    Args:
        model: folder of the first policy, with config and tokenizer.
        max_bucket_bytes: the value that the folder is written with.

    Raises:
        PublishError: the model's folder has no config.json.
        OSError: the copy is gone, or a file of the model's folder cannot be read.
    """
    files: dict[str, AnyBlob] = {}
    checksums: dict[str, int] = {}
    for path in companions(model):
        data = path.read_bytes()
        files[path.name], checksums[path.name] = BufferBlob([data]), bytes_xxh3(data)
    entries: list[TensorEntry] = []
    filled = list(buckets(copy, require_config(model), max_bucket_bytes))
    for name, bucket in zip(file_names(len(filled)), filled, strict=True):
        tensors = dict(bucket)
        parts = parts_of(tensors)
        files[name] = BufferBlob(parts, copy.kept)
        checksums[name], each = _checksums(copy, parts)
        of = dict(zip(order_of(layout_of(tensors)), each, strict=True))
        for tensor, (dtype, shape) in layout_of(tensors).items():
            entries.append(TensorEntry(tensor, dtype, shape, of[tensor], name))
    if len(filled) > 1:
        data = files_json(entries)
        files[FILES_JSON], checksums[FILES_JSON] = BufferBlob([data]), bytes_xxh3(data)
    index = index_bytes(entries, checksums, {name: blob.size for name, blob in files.items()})
    files[INDEX_FILE] = BufferBlob([index])
    return CopyFiles(digest(index), files)


def _checksums(copy: Copy, parts: Sequence[bytes | memoryview]) -> tuple[int, list[int]]:
    """Return the XXH3-64 of all parts together, and of each but the first, which is the header."""
    whole = xxhash.xxh3_64(parts[0])
    found = []
    for part in parts[1:]:
        own = xxhash.xxh3_64()
        for start in range(0, len(part), _CHUNK_BYTES):
            with copy.kept():
                own.update(part[start : start + _CHUNK_BYTES])
                whole.update(part[start : start + _CHUNK_BYTES])
        found.append(own.intdigest())
    return whole.intdigest(), found
