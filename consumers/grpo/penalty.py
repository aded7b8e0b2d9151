"""Subtract the distance to the reference policy from each reward of a batch (T11).

    every rank, its own rows ─> distances ─> added up over the ranks ─> take_off ─> advantages of whole groups, on all

The distance of a sample is the sum over all its generated tokens, whether or not they bear loss, including masked,
expired and removed ones. Its reward is compared with those of its group, and was given for the complete answer; a
distance over the loss tokens would favour answers of which more is masked.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.config.trainer import KLEstimator
from penstock.consumers.batch import layout
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import kl
from penstock.consumers.grpo.distillation import side_of
from penstock.consumers.grpo.totals import Figures, mean
from penstock.names import REFERENCE_LOGPROBS


def check_reference(batch: Batch) -> None:
    """Raise PayloadError if a row whose reward counts has no logprobs of a reference, and others have.

    Uses the rows of all ranks, so that all of them stop. If no row has any, ``side_of`` raises.
    """
    if batch.has_side(REFERENCE_LOGPROBS):
        layout.check_sides(batch.all_rows, [not row.masked for row in batch.all_rows], REFERENCE_LOGPROBS, batch.n)


def distances(
    batch: Batch, micros: Iterable[dict[str, Any]], kind: KLEstimator, device: torch.device | None = None
) -> Tensor:
    """Return [3, N] for this rank's rows among the N of the complete batch, float64 on ``device``, 0 for other rows.

    Summed estimate over the generated tokens, the same over the loss tokens, and 1 if the payload is lost.

    Args:
        micros: all rows of this rank on that device, with the logprobs of the reference.
    """
    found = torch.zeros(3, len(batch.all_rows), dtype=torch.float64, device=device)
    for micro in micros:
        reference = side_of(micro, REFERENCE_LOGPROBS, "trainer.kl")
        away = kl.estimate(micro["logprobs"], reference, micro["generated"], kind).double()
        real = micro["rows"] >= 0
        sums = torch.stack([away.sum(-1), (away * micro["loss_mask"]).sum(-1)])[:, real]
        found[:2].index_add_(1, micro["rows"][real], sums)
    lost = set(batch.lost)
    found[2, [i for i, row in zip(batch.indices, batch.rows, strict=True) if row.sample in lost]] = 1
    return found


def take_off(batch: Batch, found: Tensor, weight: float) -> Figures:
    """Set advantages from the reduced rewards; the same on every rank.

    The distance of a sample with a lost payload is unknown: it is not compared with others.

    Args:
        found: ``distances``, added up over all ranks.

    Returns:
        ``ref_kl``: mean of the estimate over the loss tokens.
    """
    drawn, of_loss, lost = found.tolist()
    rewards = [row.reward - weight * one for row, one in zip(batch.all_rows, drawn, strict=True)]
    batch.set_rewards(rewards, unknown={i for i, one in enumerate(lost) if one})
    return {"ref_kl": mean(sum(of_loss), batch.counts["loss_tokens"])}
