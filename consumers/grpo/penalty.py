"""The penalty in the reward: what the distance to the reference policy takes off each reward of a batch (T11).

    every rank, its own rows ─> distances ─> added up over the ranks ─> take_off ─> advantages of whole groups, on all

The distance of a sample is of all tokens that were drawn for it, whether they bear loss or not: of masked, expired and
removed ones too. Its reward is compared with those of its group, and was given for the whole answer; a distance over
the loss tokens would make an answer the better the more of it is masked.
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
    """Raise PayloadError where a row whose reward counts has no logprobs of a reference, and others have.

    By the rows of all ranks, so that all of them stop. Where no row has any, ``side_of`` says it.
    """
    if batch.has_side(REFERENCE_LOGPROBS):
        layout.check_sides(batch.all_rows, [not row.masked for row in batch.all_rows], REFERENCE_LOGPROBS, batch.n)


def distances(
    batch: Batch, micros: Iterable[dict[str, Any]], kind: KLEstimator, device: torch.device | None = None
) -> Tensor:
    """[3, N] of this rank's rows among the N of the whole batch, float64 on ``device``, 0 for those of others.

    Summed estimate over the tokens that were drawn, the same over the loss tokens, and 1 where the payload is lost.

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
    """Have the advantages of the rewards that are left; the same on every rank.

    A sample whose payload is lost is as far from the reference as nobody knows: it is compared with none.

    Args:
        found: ``distances``, added up over all ranks.

    Returns:
        ``ref_kl``: mean of the estimate over the loss tokens.
    """
    drawn, of_loss, lost = found.tolist()
    rewards = [row.reward - weight * one for row, one in zip(batch.all_rows, drawn, strict=True)]
    batch.set_rewards(rewards, unknown={i for i, one in enumerate(lost) if one})
    return {"ref_kl": mean(sum(of_loss), batch.counts["loss_tokens"])}
