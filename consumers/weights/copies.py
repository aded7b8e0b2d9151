"""Copy a version's weights to memory, from which they are sent and their folder is written; refuse NaN and infinity.

    source ─walk─> arena: pieces of memory that later versions reuse ─> Copy, a source of its own
             └───> FiniteCheck, before the version is announced

A copy is immutable until its arena is reused.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.weights.sources import Bucket, Source, buckets, dtype_name
from penstock.errors import PublishError, WeightsNotFinite
from penstock.weights.index import layout_digest

log = logging.getLogger(__name__)

#: Most bytes of tensors in a piece of memory, or one larger tensor. Torch rounds pinned memory up to a power of two,
#: and alignment takes some.
PIECE_BYTES = 255 * 1024**2
#: Alignment of tensors.
ALIGN_BYTES = 64
#: Bytes that a CPU checks and copies at once: they fit into its cache.
CHUNK_BYTES = 4 * 1024**2
#: Types that are checked without a cast.
_REDUCED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Copy:
    """Hold the weights of one version in host memory."""

    is_sharded = False

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        #: Name, dtype (torch's, without ``torch.``) and shape of each tensor, in the order they are sent.
        self.layout = [(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors]
        #: Identifier of this layout for workers.
        self.layout_digest = layout_digest(self.layout)
        self.num_bytes = sum(tensor.nbytes for _, tensor in tensors)

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors as a ``Source``; they are read-only."""
        yield from self._tensors


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
        failure, check, devices = None, FiniteCheck(), set()
        for number, bucket in enumerate(buckets(source, config, PIECE_BYTES)):
            try:
                for name, tensor, place in self._places(number, bucket) if failure is None else ():
                    check.add(name, tensor, place)
                    found.append((name, place))
                    devices.add(tensor.device)
            except (RuntimeError, MemoryError, OSError) as exc:
                failure = exc
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if failure is not None:
            raise PublishError(f"The weights cannot be copied into memory ({failure}): there must be room for two.")
        if not found:
            raise PublishError("there is no tensor to publish; give the model or its state dict.")
        check.raise_if_not_finite()
        self.copy = Copy(found)
        return self.copy

    def _places(self, number: int, bucket: Bucket) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, tensor, and contiguous memory of its shape and dtype in the piece of bucket ``number``."""
        rooms = [-(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for _, tensor in bucket]
        if number == len(self._pieces):
            self._pieces.append(torch.empty(0, dtype=torch.uint8))
        if self._pieces[number].numel() < sum(rooms):
            self._pieces[number] = _allocate(sum(rooms), is_pinned=any(tensor.is_cuda for _, tensor in bucket))
        for (name, tensor), part in zip(bucket, torch.split(self._pieces[number][: sum(rooms)], rooms), strict=True):
            yield name, tensor.detach(), part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _allocate(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return [num_bytes] of host memory; pinned if requested and possible."""
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:
            log.warning("copies of weights use pageable memory, which is slower: %s", exc)
    return torch.empty(num_bytes, dtype=torch.uint8)


class FiniteCheck:
    """Check the tensors of one version for NaN and Inf by their least and largest values.

    GPU    a reduction of each tensor, queued on the trainer's stream ─> one result at the end
    CPU    4 MiB ─> least and largest ─> copy from the processor's cache, so that memory is read once
    """

    def __init__(self) -> None:
        #: Name, and least and largest value on its device, of each tensor on a GPU.
        self._extremes: list[tuple[str, Tensor]] = []
        #: Tensors in host memory that are not finite.
        self._bad: list[str] = []

    def add(self, name: str, tensor: Tensor, place: Tensor | None = None) -> None:
        """Queue a tensor for the check, and copy it to ``place``, contiguous memory. Does not block for a GPU.

        The tensor must not change before ``raise_if_not_finite``.
        """
        if tensor.device.type == "cpu":
            if not _is_finite(tensor, place):
                self._bad.append(name)
            return
        if place is not None:
            place.copy_(tensor, non_blocking=True)
        self.reduce(name, tensor)

    def reduce(self, name: str, tensor: Tensor) -> None:
        """Queue the reduction of a tensor on a GPU."""
        if tensor.is_floating_point() and tensor.numel():
            self._extremes.append((name, _extremes(tensor).double()))

    def raise_if_not_finite(self) -> None:
        """Block for all reductions; raise WeightsNotFinite that names the first tensor that holds NaN or Inf."""
        bad = self._bad
        if self._extremes:
            # One transfer, so that the host waits once.
            device = self._extremes[-1][1].device
            finite = torch.stack([one.to(device) for _, one in self._extremes]).isfinite().all(dim=1).cpu()
            bad = bad + [name for (name, _), good in zip(self._extremes, finite.tolist(), strict=True) if not good]
        if bad:
            others = f" and {len(bad) - 1} other tensors" if len(bad) > 1 else ""
            raise WeightsNotFinite(f"{bad[0]}{others} of the weights to publish hold NaN or Inf.")


def _extremes(tensor: Tensor) -> Tensor:
    """Return [2] the least and the largest value; NaN if there is one."""
    return torch.stack(torch.aminmax(tensor if tensor.dtype in _REDUCED else tensor.float()))


def _is_finite(tensor: Tensor, place: Tensor | None) -> bool:
    """Return whether a tensor in host memory is finite; copy it to ``place``, which takes one pass over memory."""
    is_flat, size = tensor.is_contiguous(), CHUNK_BYTES // tensor.element_size()
    parts = torch.split(tensor.view(-1), size) if is_flat else (tensor,)
    places = (None,) * len(parts) if place is None else torch.split(place.view(-1), size) if is_flat else (place,)
    is_finite = True
    for part, target in zip(parts, places, strict=True):
        if is_finite and part.is_floating_point() and part.numel():
            is_finite = all(map(math.isfinite, _extremes(part).tolist()))
        if target is not None:
            target.copy_(part)
    return is_finite


class CheckedSource:
    """Wrap a source so that its walk ends with WeightsNotFinite if a tensor holds NaN or Inf.

    Rank 0 has the tensors of a sharded source and checks them; other ranks get the error from ``RankBarrier.follow``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.is_sharded = source.is_sharded

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        check = FiniteCheck()
        for name, tensor in self._source.tensors(config):
            check.add(name, tensor.detach())
            yield name, tensor
        check.raise_if_not_finite()
