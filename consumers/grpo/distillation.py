"""On-policy distillation: the advantage of a generated token is a teacher's judgement of it.

    advantage_t = [A +] -weight * (log p_t - log teacher_t)

with p the policy that the token's ratio is taken to: μ with correction ``bypass``, π_old with ``decoupled``, π_θ
without a gradient with ``truncated``. In expectation over samples of p, log p - log teacher is the reverse KL
KL(p || teacher) given the preceding tokens. A token is judged by itself, not by its successors (discount 0).

Sources: Thinking Machines Lab 2025, "On-Policy Distillation" (advantages are the negated reverse KL per token, in an
importance-sampling loss); slime's on-policy distillation (``--use-opd``), which subtracts the coefficient times it from
the advantages of any estimator; GKD, arXiv 2306.13649, for learning from a teacher on what the student draws.

Pure functions of tensors of one shape, [B, L] or [T].
"""

import torch
from torch import Tensor

from penstock.config.trainer import DistillConfig
from penstock.consumers.grpo.losses import log_ratio
from penstock.errors import ProtocolError


def reverse_kl(policy: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return log p - log teacher per token within ±``losses.LOG_RATIO_LIMIT``, 0 outside the mask; no gradient."""
    return log_ratio(policy.detach(), teacher, mask)[0]


def distilled(advantages: Tensor, away: Tensor, config: DistillConfig) -> Tensor:
    """Return advantages of tokens.

    Args:
        advantages: from the rewards.
        away: ``reverse_kl``.
    """
    given = advantages if config.with_rewards else torch.zeros_like(advantages)
    return given - config.weight * away


def side_of(micro: dict[str, Tensor], name: str, key: str) -> Tensor:
    """Return the side array of a micro-batch that a configuration key needs. Raises ProtocolError if it is missing."""
    if name not in micro:
        raise ProtocolError(
            f"{key} needs the side array {name!r} of each sample, and those of this batch have none: they were "
            "generated before the run asked for it, or come from a recording of such a run; begin the run anew."
        )
    return micro[name]
