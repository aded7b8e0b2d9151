"""Policy losses per token, before any correction for data that another policy drew (see ``corrections``).

Notation: θ the policy being trained, p the proximal policy that its ratio is taken to (μ or π_old), A the advantage,
r = π_θ / p of a token, clip(r) = min(max(r, 1 - low), 1 + high), sg stop-gradient.

All are pure functions of tensors of one shape, [B, L] or [T]; for [T], ``gspo`` needs to know which sample a token is
of. Where the mask is False nothing is computed and the loss is 0, so that prompts, observations and padding, between
two drawn parts of one sample too, take part in no mean.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["ppo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token", "sample", "constant"]


class TokenLoss(NamedTuple):
    #: Loss per token, 0 where the mask is 0; not divided by anything.
    loss: Tensor
    #: bool, tokens whose gradient the clip cut off (``cispo``: whose weight the clip changed).
    clipped: Tensor


def ppo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
) -> TokenLoss:
    """-min(r A, clip(r) A): PPO (Schulman et al. 2017, arXiv 1707.06347), as GRPO uses it (arXiv 2402.03300).

    low ≠ high is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476).

    Args:
        logprobs: log π_θ, carries the gradient.
        proximal: log p.
        mask: bool, tokens that bear loss.
        segments: not used; here so that all ratio losses are called alike.
    """
    return _clipped(ratio(logprobs, proximal, mask), advantages, mask, clip_low, clip_high)


def gspo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
) -> TokenLoss:
    """-min(s A, clip(s) A) with one ratio per sample, s = exp(mean over its loss tokens of log r).

    GSPO (Zheng et al. 2025, arXiv 2507.18071). The loss of a sample stands on each of its loss tokens, so its mean over
    them is the paper's, and ``aggregation: sample`` its objective. Clips are of another size than PPO's: the paper
    takes 3e-4 and 4e-4. The mean is over tokens of the mask alone: observations between two turns count neither in
    the sum nor in the length.

    Args:
        segments: [T] int64, index of the sample that each token is of, where samples lie end to end; None for [B, L],
            where a row is a sample.
        The others are as for ``ppo``.
    """
    difference = torch.where(mask, logprobs - proximal, 0.0)
    length = _per_sample(mask.to(difference.dtype), segments).clamp(min=1)
    per_sample = (_per_sample(difference, segments) / length).exp()
    spread = per_sample.expand_as(difference) if segments is None else per_sample[segments]
    return _clipped(spread, advantages, mask, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
) -> TokenLoss:
    """-sg(clip(r)) A log π_θ: the weight is clipped, never the gradient of a token.

    CISPO (MiniMax 2025, arXiv 2506.13585), whose own runs leave the lower side open (clip_low 1).

    Args:
        As for ``ppo``.
    """
    plain = ratio(logprobs, proximal, mask).detach()
    weight = plain.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * advantages * torch.where(mask, logprobs, 0.0), (weight != plain) & mask)


def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """-A log π_θ: the plain policy gradient (Williams 1992). Data of another policy needs ``corrections.truncated``."""
    return TokenLoss(-advantages * torch.where(mask, logprobs, 0.0), torch.zeros_like(mask))


#: Losses that take a ratio to a proximal policy, by name.
RatioLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, Tensor | None], TokenLoss]
RATIO_LOSSES: dict[str, RatioLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """exp(numerator - denominator), 1 outside the mask."""
    # Masked before exp: an overflow outside the mask would come back as 0 * inf in the gradient.
    return torch.where(mask, numerator - denominator, 0.0).exp()


def segments_of(cu_seqlens: Tensor) -> Tensor:
    """[T] int64 index of the sample that each token is of, from [B + 1] where each begins (``Batch.packed``)."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths.long())


def token_weights(mask: Tensor, aggregation: Aggregation, segments: Tensor | None = None) -> Tensor:
    """What each token's loss is multiplied by before the sum that ``denominator`` divides.

    1, or with ``sample`` 1 / (loss tokens of its sample), so that every sample weighs the same.
    """
    if aggregation != "sample":
        return mask.to(torch.float32)
    lengths = _per_sample(mask.to(torch.float32), segments).clamp(min=1)
    spread = lengths.expand_as(mask) if segments is None else lengths[segments]
    return mask / spread


def denominator(counts: dict[str, int], aggregation: Aggregation, constant_tokens: int | None = None) -> float:
    """What the sum over all ranks of weight x loss is divided by (T10); ``counts`` are those of the whole batch.

    - ``token``: loss tokens; every token weighs the same (DAPO, arXiv 2503.14476)
    - ``sample``: samples that bear loss; the mean of per-sample means (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071)
    - ``constant``: samples x ``constant_tokens``, the longest answer: no preference for short or long ones
      (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)
    """
    if aggregation == "token":
        return float(counts["loss_tokens"])
    if aggregation == "sample":
        return float(counts["loss_samples"])
    return float(counts["samples"]) * float(constant_tokens or 1)


def _per_sample(values: Tensor, segments: Tensor | None) -> Tensor:
    """Sums [B, 1] of rows, or [B] of segments."""
    if segments is None:
        return values.sum(-1, keepdim=True)
    count = int(segments[-1]) + 1 if len(segments) else 0
    return values.new_zeros(count).index_add(0, segments, values)


def _clipped(of: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    plain = of * advantages
    bounded = of.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.where(mask, -torch.minimum(plain, bounded), 0.0)
    return TokenLoss(loss, (bounded < plain) & mask)
