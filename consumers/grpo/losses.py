"""Policy losses per token, before any correction for samples of another policy (see ``corrections``).

Notation: θ the policy being trained, p the proximal policy that its ratio is taken to (μ or π_old), A the advantage,
r = π_θ / p of a token, clip(r) = min(max(r, 1 - low), 1 + high), c the dual clip, sg stop-gradient.

**Bounds.** min(r A, clip(r) A) bounds nothing where A < 0 and r is large: one token whose behaviour logprob is 10 nats
too low outweighs a batch. Two bounds hold that:

- the dual clip (Ye et al. 2020, arXiv 1912.09729, who take c = 3): where A < 0 the objective is not below c A
- every log r is held within ±``LOG_RATIO_LIMIT`` before it is a ratio; beyond, no gradient flows through it

All are pure functions of tensors of one shape, [B, L] or [T]; for [T], ``gspo`` needs to know the sample of each token.
Where the mask is False nothing is computed and the loss is 0, so that prompts, observations (also between two turns)
and padding do not enter any mean.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token", "sample", "constant"]


#: Most that log r may be, either way: e^20 is 5e8, and its square still a float32.
LOG_RATIO_LIMIT = 20.0
#: Default c of the dual clip.
DUAL_CLIP = 3.0


class TokenLoss(NamedTuple):
    #: Loss per token, 0 where the mask is 0; not divided by anything.
    loss: Tensor
    #: bool, tokens without gradient because of a clip: A < 0 and r below 1 - low; A > 0 and r above 1 + high; A < 0 and
    #: r above c. Losses with a clipped weight (``cispo``, ``truncated``) count tokens with a changed weight.
    low: Tensor
    high: Tensor
    dual: Tensor
    #: bool, tokens of which a log ratio is beyond ±LOG_RATIO_LIMIT.
    clamped: Tensor
    #: bool, tokens whose weight a correction's cap changed.
    capped: Tensor

    @property
    def clipped(self) -> Tensor:
        """Return bool, tokens affected by any clip."""
        return self.low | self.high | self.dual


def ppo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLoss:
    """Return -min(r A, clip(r) A), and where A < 0 at most -c A: PPO (Schulman et al. 2017, arXiv 1707.06347), as GRPO
    uses it (arXiv 2402.03300), with the dual clip (arXiv 1912.09729).

    Clips of 0.2 are the PPO paper's; low ≠ high is DAPO's clip-higher, 0.2 and 0.28 (Yu et al. 2025, arXiv 2503.14476).

    Args:
        logprobs: log π_θ, carries the gradient.
        proximal: log p.
        mask: bool, tokens that bear loss.
        segments: unused; for a common signature of ratio losses.
        dual_clip: c, more than 1; None: no such bound.
    """
    difference, beyond = log_ratio(logprobs, proximal, mask)
    return _clipped(difference.exp(), advantages, mask, clip_low, clip_high, dual_clip, beyond)


def gspo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLoss:
    """Return -min(s A, clip(s) A) with one ratio per sample, s = exp(mean over its loss tokens of log r).

    GSPO (Zheng et al. 2025, arXiv 2507.18071). The loss of a sample stands on each of its loss tokens, so its mean over
    them is the paper's, and ``aggregation: sample`` its objective. Clips are of another size than PPO's: the paper
    takes 3e-4 and 4e-4, and has no dual clip; here it bounds s as it bounds r in ``ppo``. The mean is over tokens of
    the mask alone: observations between two turns count neither in the sum nor in the length.

    Args:
        segments: [T] int64, index of the sample that each token is of, where samples lie end to end; None for [B, L],
            where a row is a sample.
        The others are as for ``ppo``.
    """
    difference, beyond = log_ratio(logprobs, proximal, mask)
    length = _per_sample(mask.to(difference.dtype), segments).clamp(min=1)
    per_sample = (_per_sample(difference, segments) / length).exp()
    spread = per_sample.expand_as(difference) if segments is None else per_sample[segments]
    return _clipped(spread, advantages, mask, clip_low, clip_high, dual_clip, beyond)


def cispo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    segments: Tensor | None = None,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLoss:
    """Return -sg(clip(r)) A log π_θ: the weight is clipped, never the gradient of a token.

    CISPO (MiniMax 2025, arXiv 2506.13585), whose own runs leave the lower side open (clip_low 1) and name no upper one;
    ScaleRL (Khatri et al. 2025, arXiv 2510.13786) holds the weight below 5 (clip_high 4). Both sides bound a losing
    token as well, so there is no dual clip.

    Args:
        segments, dual_clip: unused; for a common signature of ratio losses.
        The others are as for ``ppo``.
    """
    difference, beyond = log_ratio(logprobs, proximal, mask)
    plain = difference.detach().exp()
    weight = plain.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(
        -weight * advantages * torch.where(mask, logprobs, 0.0),
        low=(plain < weight) & mask,
        high=(plain > weight) & mask,
        dual=torch.zeros_like(mask),
        clamped=beyond,
        capped=torch.zeros_like(mask),
    )


def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """Return -A log π_θ, the plain policy gradient (Williams 1992). Off-policy data needs ``corrections.truncated``."""
    nowhere = torch.zeros_like(mask)
    return TokenLoss(-advantages * torch.where(mask, logprobs, 0.0), *[nowhere] * 5)


#: Losses that take a ratio to a proximal policy, by name.
RatioLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, Tensor | None, float | None], TokenLoss]
RATIO_LOSSES: dict[str, RatioLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return numerator - denominator within ±LOG_RATIO_LIMIT, 0 outside the mask; and where that applied (bool)."""
    # Masked before anything is made of it: an overflow outside the mask would come back as 0 * inf in the gradient.
    difference = torch.where(mask, numerator - denominator, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), difference.detach().abs() > LOG_RATIO_LIMIT


def segments_of(cu_seqlens: Tensor) -> Tensor:
    """Return [T] int64 sample of each token, from [B + 1] where each begins (``Batch.packed``)."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths.long())


def token_weights(
    mask: Tensor, aggregation: Aggregation, segments: Tensor | None = None, generated: Tensor | None = None
) -> Tensor:
    """Return the weight of each token's loss in the sum that ``denominator`` divides.

    1, or with ``sample`` 1 / (tokens that the policy generated in its sample), so that every sample weighs the same.
    Tokens that lost their loss later (expiry, ``max_token_staleness``) still count in the length: the rest of a stale
    answer does not gain weight.

    Args:
        mask: bool, tokens that bear loss.
        segments: as for ``gspo``.
        generated: bool, tokens that the policy generated; None: the mask has them all.
    """
    if aggregation != "sample":
        return mask.to(torch.float32)
    drawn = mask if generated is None else generated
    lengths = _per_sample(drawn.to(torch.float32), segments).clamp(min=1)
    spread = lengths.expand_as(mask) if segments is None else lengths[segments]
    return mask / spread


def denominator(counts: dict[str, int], aggregation: Aggregation, constant_tokens: int | None = None) -> float:
    """Return the divisor of the sum over all ranks of weight x loss (T10); ``counts`` are those of the complete batch.

    - ``token``: loss tokens; every token weighs the same (DAPO, arXiv 2503.14476)
    - ``sample``: samples that bear loss; the mean of per-sample sums over their generated lengths (GRPO, arXiv
      2402.03300; GSPO, arXiv 2507.18071)
    - ``constant``: samples x ``constant_tokens``, the longest answer: no preference for short or long ones
      (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)
    """
    if aggregation == "token":
        return float(counts["loss_tokens"])
    if aggregation == "sample":
        return float(counts["loss_samples"])
    return float(counts["samples"]) * float(constant_tokens or 1)


def _per_sample(values: Tensor, segments: Tensor | None) -> Tensor:
    """Return sums [B, 1] of rows, or [B] of segments."""
    if segments is None:
        return values.sum(-1, keepdim=True)
    count = int(segments[-1]) + 1 if len(segments) else 0
    return values.new_zeros(count).index_add(0, segments, values)


def _clipped(
    of: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    beyond: Tensor,
) -> TokenLoss:
    plain = -of * advantages
    bounded = -of.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, losing = torch.maximum(plain, bounded), advantages < 0
    stopped = (bounded > plain) & mask
    dual = torch.zeros_like(mask)
    if dual_clip is not None:
        most = -dual_clip * advantages
        dual = losing & (loss > most) & mask
        loss = torch.where(losing, torch.minimum(loss, most), loss)
    never = torch.zeros_like(mask)
    return TokenLoss(torch.where(mask, loss, 0.0), stopped & losing, stopped & ~losing, dual, beyond, never)
