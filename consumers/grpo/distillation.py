"""On-policy distillation: a teacher's judgement of every token that the policy drew, as that token's advantage.

    advantage_t = [A +] -weight * (log p_t - log teacher_t)

with p the policy that the token's ratio is taken to: μ with correction ``bypass``, π_old with ``decoupled``, π_θ
without a gradient with ``truncated``. In expectation over what p draws, log p - log teacher is the reverse KL
KL(p || teacher) given what stands before the token. A token answers for itself, not for what follows it (discount 0).

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
    """log p - log teacher of each token within ±``losses.LOG_RATIO_LIMIT``, 0 outside the mask; carries no gradient."""
    return log_ratio(policy.detach(), teacher, mask)[0]


def distilled(advantages: Tensor, away: Tensor, config: DistillConfig) -> Tensor:
    """Advantages of tokens.

    Args:
        advantages: of the rewards.
        away: ``reverse_kl``.
    """
    given = advantages if config.with_rewards else torch.zeros_like(advantages)
    return given - config.weight * away


def side_of(micro: dict[str, Tensor], name: str, key: str) -> Tensor:
    """The side array of a micro-batch that a key of the configuration needs. Raises ProtocolError where it has none."""
    if name not in micro:
        raise ProtocolError(
            f"{key} needs the side array {name!r} of each sample, and those of this batch have none: they were drawn "
            "before the run asked for it, or come from a recording of such a run; begin the run anew."
        )
    return micro[name]
