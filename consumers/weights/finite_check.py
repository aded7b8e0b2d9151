"""Refuse weights that are NaN or infinite before their version is announced.

    GPU    groups of tensors ─> one fused reduction each, queued on the trainer's stream ─────────┐
    CPU    4 MiB ─> sum ─> copy from the processor's cache, so that memory is read once ──────────┴─> one result

The host waits for the device once, for the result.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.weights.sources import Source
from penstock.errors import WeightsNotFinite

#: Most bytes of a group of tensors on a GPU, which stay allocated until it is reduced.
GROUP_BYTES = 256 * 1024**2
#: Bytes that a CPU reduces and copies at once: they fit into its cache.
CHUNK_BYTES = 4 * 1024**2
#: Types that are reduced without a cast.
_REDUCED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class FiniteCheck:
    """Check the tensors of one version for NaN and Inf."""

    def __init__(self) -> None:
        self._group: list[tuple[str, Tensor]] = []
        self._group_bytes = 0
        #: Names, and a bool for each on the tensors' device.
        self._reduced: list[tuple[list[str], Tensor]] = []
        #: Name, tensor and sums of each tensor in host memory.
        self._sums: list[tuple[str, Tensor, list[Tensor]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor for the check. It must not change before ``raise_if_not_finite``. Does not block for a GPU."""
        self._add(name, tensor, None)

    def copy(self, name: str, tensor: Tensor, place: Tensor) -> None:
        """Copy a tensor to ``place``, and check it as ``add`` does."""
        if not self._add(name, tensor, place):
            place.copy_(tensor, non_blocking=True)

    def raise_if_not_finite(self) -> None:
        """Block for all reductions.

        Raises:
            WeightsNotFinite: names the first tensor that holds NaN or Inf.
        """
        if names := self._not_finite():
            others = f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
            raise WeightsNotFinite(f"{names[0]}{others} of the weights to publish hold NaN or Inf.")

    def _add(self, name: str, tensor: Tensor, place: Tensor | None) -> bool:
        """Queue a tensor; return True if it was also copied to ``place``."""
        if not tensor.is_floating_point() or not tensor.numel():
            return False
        if tensor.device.type == "cpu":
            is_flat = tensor.is_contiguous() and tensor.dtype in _REDUCED
            self._sums.append((name, tensor, _summed(tensor, place) if is_flat else [_sum(tensor)]))
            return is_flat and place is not None
        if self._group and self._group[0][1].device != tensor.device:
            self._flush()
        self._group.append((name, tensor))
        self._group_bytes += tensor.nbytes
        if self._group_bytes >= GROUP_BYTES:
            self._flush()
        return False

    def _flush(self) -> None:
        group, self._group, self._group_bytes = self._group, [], 0
        if group:
            self._reduced.append(reduce_group(group))

    def _not_finite(self) -> list[str]:
        self._flush()
        found = self._not_finite_sums()
        if not self._reduced:
            return found
        # One transfer, so that the host waits once.
        device = self._reduced[0][1].device
        finite = torch.cat([values.to(device) for _, values in self._reduced]).cpu()
        names = [name for group, _ in self._reduced for name in group]
        return found + [name for name, good in zip(names, finite.tolist(), strict=True) if not good]

    def _not_finite_sums(self) -> list[str]:
        """Return tensors with a NaN or infinite sum whose values are not finite; sums of finite values may overflow."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for total in (total for _, _, some in self._sums for total in some):
            by_dtype.setdefault(total.dtype, []).append(total)
        if all(torch.stack(some).isfinite().all() for some in by_dtype.values()):
            return []
        return [name for name, tensor, some in self._sums if not _are_finite(some) and not _is_finite(tensor)]


class CheckedSource:
    """Wrap a source so that its walk ends with an error if a tensor holds NaN or Inf.

    Rank 0 has the tensors of a sharded source and checks them; other ranks get the error from ``Publisher.follow``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.is_sharded = source.is_sharded

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the source. Blocks at the end for the check; raises WeightsNotFinite."""
        check = FiniteCheck()
        for name, tensor in self._source.tensors(config):
            check.add(name, tensor.detach())
            yield name, tensor
        check.raise_if_not_finite()


def reduce_group(group: list[tuple[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Return names and whether each tensor is finite, [N] bool on their device: one reduction fused over each type.

    Returns at once.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, tensor in group:
        reduced = tensor if tensor.dtype in _REDUCED else tensor.float()
        by_dtype.setdefault(reduced.dtype, []).append((name, reduced))
    names = [name for some in by_dtype.values() for name, _ in some]
    norms = [torch._foreach_norm([tensor for _, tensor in some], math.inf) for some in by_dtype.values()]
    return names, torch.cat([torch.stack(some).isfinite() for some in norms])


def _summed(tensor: Tensor, place: Tensor | None) -> list[Tensor]:
    """Return the sum of each chunk of a contiguous tensor, and copy the chunk while it is in the cache."""
    size = CHUNK_BYTES // tensor.element_size()
    if place is None or tensor.numel() <= size:
        if place is not None:
            place.copy_(tensor)
        return [_sum(tensor)]
    sums = []
    for chunk, target in zip(torch.split(tensor.view(-1), size), torch.split(place.view(-1), size), strict=True):
        sums.append(_sum(chunk))
        target.copy_(chunk)
    return sums


def _sum(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float64, torch.float32, torch.bfloat16):
        return tensor.sum()
    return tensor.float().sum()  # the largest float16 is 65,504


def _are_finite(sums: list[Tensor]) -> bool:
    return all(math.isfinite(total.item()) for total in sums)


def _is_finite(tensor: Tensor) -> bool:
    extremes = torch.aminmax(tensor if tensor.dtype in _REDUCED else tensor.float())
    return all(math.isfinite(one.item()) for one in extremes)
