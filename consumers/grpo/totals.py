"""Metrics of the optimizer steps on one batch: sums over its loss tokens, kept on the device until read once.

With r = π_θ / μ of a token when it is trained (μ the behaviour policy):

- ``ess``: (Σ r)² / (N Σ r²), the share of tokens that these weights are worth (Kong 1992); 1 where π_θ is μ
- ``k3``: mean of r - 1 - log r, an estimate of KL(μ || π_θ) that is never negative (Schulman 2020, "Approximating KL
  divergence")
- quantiles of r out of a histogram of log r, so that ranks add theirs up and no token travels
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.consumers.grpo.losses import LOG_RATIO_LIMIT, TokenLoss, log_ratio

#: Bins of the histogram, and where it turns from even to logarithmic: a quantile of log r is off by 0.3 %, or 3e-7.
_BINS = 4096
_FINEST = 1e-4
_REACH = math.asinh(LOG_RATIO_LIMIT / _FINEST)
#: Metrics by name; None: there was no token to measure.
Figures: TypeAlias = dict[str, float | None]
#: Name of a metric -> quantile.
_QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


class Totals:
    """Sums, maxima and a histogram over the loss tokens of a batch, of every pass over it.

    Args:
        means: names of further metrics, the same on every rank.
    """

    def __init__(self, device: torch.device, means: Sequence[str] = ()) -> None:
        self._means = {name: torch.zeros(1, dtype=torch.float64, device=device) for name in means}
        #: tokens, loss, clipped low, high and dual, clamped, weight capped, -log π_θ, r, r², k3
        self.sums = torch.zeros(11, dtype=torch.float64, device=device)
        #: tokens and |difference|, of all and of fresh tokens, where the policy had made no step on the batch yet
        self.first = torch.zeros(4, dtype=torch.float64, device=device)
        #: largest |difference|, of all and of fresh tokens; largest log r and -log r
        self.maxima = torch.full((4,), -torch.inf, dtype=torch.float64, device=device)
        self.histogram = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(
        self, mask: Tensor, staleness: Tensor, logprobs: Tensor, behaviour: Tensor, of: TokenLoss, old: Tensor | None
    ) -> None:
        """Add one micro-batch.

        Args:
            logprobs, behaviour: log π_θ and log μ, without a gradient.
            old: log π_old, in the first pass; None: in a later one, or if it was not computed.
        """
        bounded, _ = log_ratio(logprobs, behaviour, mask)
        away = bounded.double()
        ratio = away.exp()
        self.sums += torch.stack(
            [
                mask.sum(),
                of.loss.detach().sum(dtype=torch.float64),
                of.low.sum(),
                of.high.sum(),
                of.dual.sum(),
                of.clamped.sum(),
                of.capped.sum(),
                -(torch.where(mask, logprobs, 0.0)).sum(dtype=torch.float64),
                (ratio * mask).sum(),
                (ratio.square() * mask).sum(),
                (ratio - 1 - away).sum(),
            ]
        )
        self.maxima[2:] = torch.maximum(self.maxima[2:], _largest(torch.stack([away, -away]), mask))
        self.histogram += _histogram(away, mask)
        if old is not None:
            self._add_first(mask, mask & (staleness == 0), old, behaviour)

    def add_mean(self, name: str, values: Tensor) -> None:
        """Add values of a further mean: a number for each token, 0 outside the mask."""
        self._means[name] += values.detach().sum(dtype=torch.float64)

    def _add_first(self, mask: Tensor, fresh: Tensor, old: Tensor, behaviour: Tensor) -> None:
        difference = torch.where(mask, old - behaviour, 0.0).abs().double()
        self.first += torch.stack([mask.sum(), difference.sum(), fresh.sum(), (difference * fresh).sum()])
        of_both = torch.stack([difference.max(), (difference * fresh).max()])
        self.maxima[:2] = torch.maximum(self.maxima[:2], of_both)

    def reduce(self, dp_size: int, process_group: dist.ProcessGroup | None, passes: int = 1) -> Figures:
        """Return means, maxima and quantiles over all ranks, None for each that has no token. Blocks for all ranks.

        Args:
            passes: times that every token was added.
        """
        if dp_size > 1:
            for tensor in (self.sums, self.first, self.histogram, *self._means.values()):
                dist.all_reduce(tensor, group=process_group)
            dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=process_group)
        trained, loss, low, high, dual, clamped, capped, surprise, weight, square, k3 = self.sums.tolist()
        tokens, difference, fresh, fresh_difference = self.first.tolist()
        largest, fresh_largest, above, below = self.maxima.tolist()
        return {
            "loss": mean(loss, trained),
            "clip_frac": mean(low + high + dual, trained),
            "clip_low_frac": mean(low, trained),
            "clip_high_frac": mean(high, trained),
            "clip_dual_frac": mean(dual, trained),
            "ratio_clamped_frac": mean(clamped, trained),
            "weight_capped_frac": mean(capped, trained),
            "entropy": mean(surprise, trained),
            "ess": mean(weight**2, trained * square),
            "k3": mean(k3, trained),
            "ratio_min": math.exp(-below) if trained else None,
            "ratio_max": math.exp(above) if trained else None,
            **_quantiles(self.histogram),
            "logprob_diff_mean": mean(difference, tokens),
            "logprob_diff_max": largest if tokens else None,
            "logprob_diff_fresh_mean": mean(fresh_difference, fresh),
            "logprob_diff_fresh_max": fresh_largest if fresh else None,
            "tokens": trained / passes,
            **{name: mean(float(total), trained) for name, total in self._means.items()},
        }


def mean(total: float, count: float) -> float | None:
    """Return ``total / count``; None if ``count`` is 0."""
    return total / count if count else None


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Return [2] largest of each where the mask is True."""
    return torch.where(mask, values, -torch.inf).flatten(1).amax(1)


def _histogram(away: Tensor, mask: Tensor) -> Tensor:
    """Return [_BINS] counts of log ratios where the mask is True; a NaN, which the norm of the gradient shows, is in
    none. Without ``bincount``, for which a GPU's host waits."""
    place = (torch.asinh(away.nan_to_num() / _FINEST) / _REACH + 1) * (_BINS / 2)
    counts = torch.zeros(_BINS, dtype=torch.int64, device=away.device)
    return counts.index_add_(0, place.long().clamp(0, _BINS - 1).flatten(), (mask & ~away.isnan()).long().flatten())


def _quantiles(histogram: Tensor) -> Figures:
    """Return r at each quantile, the middle of the bin that holds it; None if no token has a finite ratio."""
    upto = histogram.cumsum(0)
    total = int(upto[-1])
    out: Figures = {}
    for name, share in _QUANTILES.items():
        at = int(torch.searchsorted(upto, max(1, math.ceil(share * total))))
        place = (min(at, _BINS - 1) + 0.5) / (_BINS / 2) - 1
        out[name] = math.exp(_FINEST * math.sinh(place * _REACH)) if total else None
    return out
