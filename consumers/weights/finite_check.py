"""Refuse weights that are NaN or infinite before their version is announced.

GPU    groups of tensors ─> one fused reduction each, queued on the trainer's stream ─> one result at the end
CPU    smallest and largest value of each tensor, at once
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
#: Types that are reduced without a cast.
_REDUCED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class FiniteCheck:
    """Check the tensors of one version for NaN and Inf."""

    def __init__(self) -> None:
        self._group: list[tuple[str, Tensor]] = []
        self._group_bytes = 0
        #: Tensors in host memory that are not finite.
        self._bad: list[str] = []
        #: Names, and a bool for each on the tensors' device.
        self._verdicts: list[tuple[list[str], Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor for the check. It must not change before ``raise_if_not_finite``. Does not block for a GPU."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if tensor.device.type == "cpu":
            # A norm would be 20 times slower there.
            extremes = torch.aminmax(tensor if tensor.dtype in _REDUCED else tensor.float())
            if not all(math.isfinite(value.item()) for value in extremes):
                self._bad.append(name)
            return
        if self._group and self._group[0][1].device != tensor.device:
            self._flush()
        self._group.append((name, tensor))
        self._group_bytes += tensor.nbytes
        if self._group_bytes >= GROUP_BYTES:
            self._flush()

    def raise_if_not_finite(self) -> None:
        """Block for all reductions.

        Raises:
            WeightsNotFinite: names the first tensor that holds NaN or Inf.
        """
        self._flush()
        bad = list(self._bad)
        if self._verdicts:
            # One transfer, so that the host waits once.
            device = self._verdicts[0][1].device
            finite = torch.cat([verdicts.to(device) for _, verdicts in self._verdicts]).cpu()
            names = [name for group, _ in self._verdicts for name in group]
            bad += [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
        if bad:
            others = f" and {len(bad) - 1} other tensors" if len(bad) > 1 else ""
            raise WeightsNotFinite(f"{bad[0]}{others} of the weights to publish hold NaN or Inf.")

    def _flush(self) -> None:
        """Reduce the group: one reduction fused over each type. Returns at once."""
        group, self._group, self._group_bytes = self._group, [], 0
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in group:
            reduced = tensor if tensor.dtype in _REDUCED else tensor.float()
            by_dtype.setdefault(reduced.dtype, []).append((name, reduced))
        for some in by_dtype.values():
            norms = torch._foreach_norm([tensor for _, tensor in some], math.inf)
            self._verdicts.append(([name for name, _ in some], torch.stack(norms).isfinite()))


class CheckedSource:
    """Wrap a source so that its walk ends with an error if a tensor holds NaN or Inf.

    Rank 0 has the tensors of a sharded source and checks them; other ranks get the error from ``RankBarrier.follow``.
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
