"""Check that optimizer steps change the weights: a step can be lost in the rounding of a coarse number type."""

import logging
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from penstock.consumers.grpo.shards import local

log = logging.getLogger(__name__)

#: Optimizer steps with a learning rate above 0 that are checked, from the first one of a process.
CHECKED_STEPS = 10
#: Weights that are compared; all of them in a smaller model.
SAMPLE_SIZE = 1_000_000
#: Share of changed weights below which a step is warned of.
LEAST_SHARE = 0.5


class WeightChanges:
    """Compare a sample of the weights before and after each of the first optimizer steps.

    Args:
        parameters: the master weights that are trained; of sharded ones this rank's part is compared.
        sample_size: number of weights, spread evenly over all of them.
    """

    def __init__(self, parameters: Iterable[Tensor], sample_size: int = SAMPLE_SIZE) -> None:
        self._parameters = list(parameters)
        self._sample_size = sample_size
        self._places: list[Tensor] | None = None
        self._before: Tensor | None = None
        #: Steps that were compared.
        self.steps = 0

    def before_step(self, lr: float) -> None:
        """Copy the sample, if the next optimizer step is to be checked."""
        self._before = self._sample() if lr > 0 and self.steps < CHECKED_STEPS else None

    def after_step(self) -> float | None:
        """Return the share of the sample that the step changed, and warn if it is low; None if it was not checked.

        Blocks until the device has made the step.
        """
        if self._before is None:
            return None
        share = float((self._sample() != self._before).double().mean())
        self._before = None
        self.steps += 1
        if self.steps == CHECKED_STEPS:
            self._places = None
        if share < LEAST_SHARE:
            dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in self._parameters}))
            log.warning(
                "optimizer step %d of this process changed %.2f %% of the weights: steps are lost in rounding if the "
                "weights (%s) are not float32; else raise trainer.lr, or check which parameters have no gradient",
                self.steps,
                100 * share,
                dtypes,
            )
        return share

    @torch.no_grad()
    def _sample(self) -> Tensor:
        """Return the weights at the sampled places, end to end."""
        places = self._places if self._places is not None else self._choose()
        self._places = places
        return torch.cat([local(one).reshape(-1)[at].float() for one, at in zip(self._parameters, places, strict=True)])

    def _choose(self) -> list[Tensor]:
        """Return the sampled places of each parameter, on its device."""
        sizes = torch.tensor([0, *(local(one).numel() for one in self._parameters)])
        total = int(sizes.sum())
        count = min(total, self._sample_size)
        places = torch.arange(count) * total // max(count, 1)
        ends = sizes.cumsum(0)
        cuts = pairwise(torch.searchsorted(places, ends).tolist())
        return [
            (places[low:high] - start).to(one.device)
            for (low, high), start, one in zip(cuts, ends.tolist(), self._parameters, strict=False)
        ]
