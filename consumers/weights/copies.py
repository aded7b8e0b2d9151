"""Copy a version's weights to memory, from which they are sent and their folder is written.

    source ─walk─> arena: pieces of memory that later versions reuse ─> Copy, a source of its own

A copy is immutable until its arena is reused.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.weights.finite_check import FiniteCheck
from penstock.consumers.weights.sources import Source, buckets, dtype_name
from penstock.errors import PublishError
from penstock.weights.index import layout_digest

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
        self.copy = None
        found: list[tuple[str, Tensor]] = []
        failure, check = None, FiniteCheck()
        places, devices = _Places(self._pieces), set()
        for bucket in buckets(source, config, PIECE_BYTES):
            for name, tensor in bucket if failure is None else ():
                try:
                    place = places.of(tensor)
                    place.copy_(tensor.detach(), non_blocking=True)
                    check.add(name, tensor.detach())
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
