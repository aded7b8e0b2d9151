"""One correction for samples of another policy, never two (T9), around any loss of ``losses``.

Notation: θ the policy being trained, old the policy at the batch's first optimizer step, μ the behaviour policy (which
generated the tokens, T6), A the advantage, sg stop-gradient. With L(r) a loss of ``losses`` whose ratio is r:

- ``bypass``: L(π_θ / μ), no other weight; the behaviour policy is the proximal one.
- ``decoupled``: w L(π_θ / π_old), w = sg(min(π_old / μ, C)). Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641) as
  AReaL uses it (Fu et al. 2025, arXiv 2505.24298); where π_old differs from μ by engine against trainer alone, it is
  the truncated importance sampling that Yao et al. 2025 put on PPO ("Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training"). With one optimizer step per batch π_θ is π_old, so that r is 1, no clip acts, and what is
  left is the gradient of ``truncated``: it takes several (``trainer.minibatches``, ``trainer.epochs``) to differ.
- ``truncated``: -w A log π_θ, w = sg(min(π_θ / μ, C)): truncated importance sampling of the plain policy gradient
  (Ionides 2008; the ρ of V-trace, Espeholt et al. 2018, arXiv 1802.01561). No π_old, no clip.

Tokens that are too stale are masked before: at the cut (``staleness.on_expiry: mask``), or by ``Batch`` with
``trainer.max_token_staleness``; both keep the denominators exact.

Everything here is a pure function of tensors of one shape, [B, L] or [T].
"""

import torch
from torch import Tensor

from penstock.consumers.grpo.losses import DUAL_CLIP, RatioLoss, TokenLoss, log_ratio, ppo, reinforce

__all__ = ["DEFAULT_CAP", "TokenLoss", "bypass", "decoupled", "token_logprobs", "truncated"]

#: Default of C.
DEFAULT_CAP = 2.0


def token_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """Return [B, L] float32 log-probability of each token given those before it, at its sampling temperature.

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
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    loss: RatioLoss = ppo,
    segments: Tensor | None = None,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLoss:
    """Return L(r) with r = π_θ / μ.

    Args:
        logprobs: log π_θ, carries the gradient.
        behaviour: log μ.
        mask: bool; where False, nothing is computed and the loss is 0.
        loss, segments, dual_clip: see ``losses``.
    """
    return loss(logprobs, behaviour, advantages, mask, clip_low, clip_high, segments, dual_clip)


def decoupled(
    logprobs: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    cap: float,
    *,
    loss: RatioLoss = ppo,
    segments: Tensor | None = None,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLoss:
    """Return w L(r) with r = π_θ / π_old and w = min(π_old / μ, cap), through which no gradient flows.

    Args:
        old: log π_old, from one pass over the whole batch before its first optimizer step.
        The others are as for ``bypass``.

    Returns:
        ``capped`` marks the tokens whose weight the cap changed.
    """
    away, beyond = log_ratio(old.detach(), behaviour.detach(), mask)
    weight = away.exp()
    of = loss(logprobs, old.detach(), advantages, mask, clip_low, clip_high, segments, dual_clip)
    capped = (weight > cap) & mask
    return of._replace(loss=weight.clamp(max=cap) * of.loss, clamped=of.clamped | beyond, capped=capped)


def truncated(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, cap: float) -> TokenLoss:
    """Return -w A log π_θ with w = min(π_θ / μ, cap), through which no gradient flows.

    Returns:
        ``high`` and ``capped`` mark the tokens whose weight the cap changed.
    """
    away, beyond = log_ratio(logprobs.detach(), behaviour, mask)
    plain, of = away.exp(), reinforce(logprobs, advantages, mask)
    capped = (plain > cap) & mask
    return of._replace(loss=plain.clamp(max=cap) * of.loss, high=capped, clamped=beyond, capped=capped)
