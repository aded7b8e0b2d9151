"""Measure differences of logprobs through rounding alone, as a floor for those between engine and trainer.

    first batch ─> |log π in the trainer's type - log π in the engines' type|, mean over its loss tokens ─> floor
    every step  ─> logprob_diff_fresh_mean above 3 x floor ─> a warning, once until it is below again

The figure depends on types and model: with weights in bfloat16 a model of 135M differs from itself in float32 by about
0.04 per token, which says nothing of a bug.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call

from penstock.config import Config
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.pictures import add_images
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.step import GRPO, to_device
from penstock.consumers.grpo.totals import mean
from penstock.consumers.weights.sources import float32_names
from penstock.model.folder import read_config
from penstock.system.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

#: Multiple of the floor above which a warning is logged: engines have other kernels than the trainer.
FACTOR = 3.0
#: Floor for engines that round like the trainer; kernels and orders of sums differ.
LEAST_FLOOR = 1e-5


class RoundingFloor:
    """The floor of one run, measured once per process.

    Args:
        dtype: of the engines' weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        #: Mean difference per token; None before the first batch that has loss tokens, and where it cannot be measured.
        self.value: float | None = None
        self._is_done = self._warned = False

    def measure(self, learner: GRPO, batch: Batch) -> None:
        """Compare log-probabilities of this rank's share in both types, once. Blocks for two forward passes.

        A copy of the weights in the engines' type is held meanwhile. If both are float32 nothing is computed, and of a
        policy that is split over ranks nothing is known.
        """
        if self._is_done or learner.is_sharded:
            return
        try:
            found = rounding_of(learner, batch, self.dtype)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            self._is_done = True
            log.warning("not enough memory to measure the floor of logprob differences: %s", exc)
            return
        if found is not None:
            self._is_done, self.value = True, max(found, LEAST_FLOOR)
            dtypes = f"{_name(learner.compute_dtype)} against engines in {_name(self.dtype)}"
            log.info("logprobs differ by %.2g per token through rounding alone (%s)", self.value, dtypes)

    def compare(self, figures: Mapping[str, Any]) -> None:
        """Warn if the difference of fresh tokens is larger than rounding explains."""
        fresh = figures.get("logprob_diff_fresh_mean")
        if fresh is None or self.value is None:
            return
        is_above = fresh > FACTOR * self.value
        if is_above and not self._warned:
            log.warning(
                "logprobs of engines and trainer differ by %.2g per token (logprob_diff_fresh_mean), %.1f times what "
                "rounding alone makes of them (logprob_diff_floor, %.2g): check that both have the same weights, "
                "chat template and temperature, and that no engine quantizes",
                fresh,
                fresh / self.value,
                self.value,
            )
        self._warned = is_above


def engine_dtype(config: Config) -> torch.dtype:
    """Return the type of the engines' weights: ``model.dtype``, or what SGLang makes of the model's config.json."""
    if config.model.dtype != "auto":
        return dtype_of(config.model.dtype) or torch.float32
    settings = read_config(config.model.path)
    inner = settings.get("text_config")
    nested = inner if isinstance(inner, dict) else {}
    names = (one.get(key) for one in (settings, nested) for key in ("dtype", "torch_dtype"))
    found = next((dtype for name in names if (dtype := dtype_of(str(name))) is not None), torch.float32)
    if found is not torch.float32:
        return found
    # SGLang converts float32 to half precision by default.
    return torch.bfloat16 if str(settings.get("model_type", "")).startswith("gemma") else torch.float16


def dtype_of(name: str) -> torch.dtype | None:
    """Return torch's type of a name, None if it has none."""
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


@torch.no_grad()
def rounding_of(learner: GRPO, batch: Batch, dtype: torch.dtype) -> float | None:
    """Return the mean |difference| per loss token of this rank's share; None if it has none.

    Parameters are rounded as engines round them. Buffers are not: engines keep the frequencies of RoPE in float32.
    """
    if dtype is learner.compute_dtype is torch.float32:
        return 0.0
    model, kept = learner.model, float32_names(learner.model, _name(dtype))
    # Without autocast: its weights have the type of each operation.
    policy = Policy(model, torch.float32)
    rounded = {
        f"model.{name}": parameter.to(dtype)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not (kept and kept.search(name))
    }
    total = count = 0.0
    for made in batch.micro_batches(learner.config.max_tokens, learner.max_samples):
        micro = to_device(made, learner.device)
        add_images(batch, [[micro]])
        mask = micro["loss_mask"]
        away = learner.logprobs(micro) - functional_call(policy, rounded, (micro,))
        total += float(torch.where(mask, away, 0.0).abs().sum(dtype=torch.float64))
        count += float(mask.sum())
    return mean(total, count)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
