"""The policy loss per token: one correction for data that another policy drew, never two (T9).

Notation: θ the policy being trained, old the policy at the batch's first optimizer step, μ the behaviour policy (what
the engine drew with, T6), A the advantage, clip(r) = min(max(r, 1 - low), 1 + high).

- ``bypass``: r = π_θ / μ, loss = -min(r A, clip(r) A), no other weight. PPO (Schulman et al. 2017, arXiv 1707.06347)
  with the behaviour policy as its proximal one; low ≠ high is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476).
- ``decoupled``: w = stop_gradient(min(π_old / μ, C)), r = π_θ / π_old, loss = -w min(r A, clip(r) A). Decoupled PPO
  (Hilton et al. 2021, arXiv 2110.00641) as AReaL uses it (Fu et al. 2025, arXiv 2505.24298).

Everything here is a pure function of tensors of one shape, [B, L] or [T].
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    #: Loss per token, 0 where the mask is 0; not divided by anything.
    loss: Tensor
    #: bool, tokens whose gradient the clip cut off.
    clipped: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """[B, L] float32 log-probability of each token given those before it, as a sampler at its temperature has it.

    ``log_softmax(logits / T)`` of position t - 1 at ``tokens[t]``, so that index and length are those of ``tokens``
    and of the behaviour logprobs (T6). Position 0 has nothing before it and is 0.

    Args:
        logits: [B, L, V], any float dtype.
        tokens: [B, L] int64.
        temperatures: [B], or [B, L] where it differs within a row.
    """
    if temperatures.dim() == 1:
        temperatures = temperatures[:, None].expand(tokens.shape)
    scaled = logits[:, :-1].float() / temperatures[:, 1:, None]
    chosen = scaled.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen - scaled.logsumexp(-1), (1, 0))


def bypass(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """-min(r A, clip(r) A) with r = π_θ / μ.

    Args:
        logprobs: log π_θ, carries the gradient.
        behaviour: log μ.
        mask: bool; where False, nothing is computed and the loss is 0.
    """
    return _clipped(_ratio(logprobs, behaviour, mask), advantages, mask, clip_low, clip_high)


def decoupled(
    logprobs: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> TokenLoss:
    """-w min(r A, clip(r) A) with r = π_θ / π_old and w = min(π_old / μ, cap), through which no gradient flows.

    Args:
        old: log π_old, from one pass over the whole batch before its first optimizer step.
        The others are as for ``bypass``.
    """
    weight = _ratio(old, behaviour, mask).clamp(max=cap).detach()
    loss, clipped = _clipped(_ratio(logprobs, old.detach(), mask), advantages, mask, clip_low, clip_high)
    return TokenLoss(weight * loss, clipped)


def _ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    # Masked before exp: an overflow outside the mask would come back as 0 * inf in the gradient.
    return torch.where(mask, numerator - denominator, 0.0).exp()


def _clipped(ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.where(mask, -torch.minimum(plain, bounded), 0.0)
    return TokenLoss(loss, (bounded < plain) & mask)
