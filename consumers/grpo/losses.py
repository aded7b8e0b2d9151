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

from penstock.config.trainer import DistillConfig, KLEstimator
from penstock.errors import ProtocolError

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


def estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: KLEstimator) -> Tensor:
    """Estimate KL(π || reference) per token by one of Schulman's estimators; 0 where the mask is False.

    With log r = log reference - log π of a token sampled from π:

    - ``k1``: -log r; unbiased, of high variance, negative at times. Its gradient has mean 0: in the loss it is noise
    - ``k2``: (log r)^2 / 2; biased, never negative; its gradient is that of the KL, on policy
    - ``k3``: r - 1 - log r; unbiased, never negative; GRPO's penalty (arXiv 2402.03300, equation 4)

    Source: Schulman 2020, "Approximating KL Divergence". Tokens of an older policy are treated as samples of π, as GRPO
    does. Every log r is clamped to ±``losses.LOG_RATIO_LIMIT``; beyond, no gradient flows.

    Args:
        logprobs: log π, [B, L] or [T]; may carry a gradient.
        reference: log-probabilities of the reference, same shape; carries none.
    """
    away, _ = log_ratio(reference.detach(), logprobs, mask)
    if kind == "k1":
        return -away
    if kind == "k2":
        return away.square() / 2
    return away.expm1() - away


# On-policy distillation: the advantage of a generated token is a teacher's judgement of it.
#
#     advantage_t = [A +] -weight * (log p_t - log teacher_t)
#
# with p the policy that the token's ratio is taken to: μ with correction ``bypass``, π_old with ``decoupled``, π_θ
# without a gradient with ``truncated``. In expectation over samples of p, log p - log teacher is the reverse KL KL(p
# || teacher) given the preceding tokens. A token is judged by itself, not by its successors (discount 0).
#
# Sources: Thinking Machines Lab 2025, "On-Policy Distillation" (advantages are the negated reverse KL per token, in
# an importance-sampling loss); slime's on-policy distillation (``--use-opd``), which subtracts the coefficient times
# it from the advantages of any estimator; GKD, arXiv 2306.13649, for learning from a teacher on what the student
# draws.
#
# Pure functions of tensors of one shape, [B, L] or [T].


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


# One correction for samples of another policy, never two (T9), around any loss of ``losses``.
#
# Notation: θ the policy being trained, old the policy at the batch's first optimizer step, μ the behaviour policy
# (which generated the tokens, T6), A the advantage, sg stop-gradient. With L(r) a loss of ``losses`` whose ratio is
# r:
#
# - ``bypass``: L(π_θ / μ), no other weight; the behaviour policy is the proximal one.
# - ``decoupled``: w L(π_θ / π_old), w = sg(min(π_old / μ, C)). Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641),
#   used by AReaL (Fu et al. 2025, arXiv 2505.24298); with π_old and μ apart only by the rounding of engine and
#   trainer, it is the truncated importance sampling that Yao et al. 2025 add to PPO ("Your Efficient RL Framework
#   Secretly Brings You Off-Policy RL Training"). With one optimizer step per batch π_θ is π_old, so that r is 1, no
#   clip acts, and the gradient of ``truncated`` remains: it takes several (``trainer.minibatches``,
#   ``trainer.epochs``) to differ.
# - ``truncated``: -w A log π_θ, w = sg(min(π_θ / μ, C)): truncated importance sampling of the plain policy gradient
#   (Ionides 2008; the ρ of V-trace, Espeholt et al. 2018, arXiv 1802.01561). No π_old, no clip.
#
# Tokens that are too stale are masked before: at the cut (``staleness.on_expiry: mask``), or by ``Batch`` with
# ``trainer.max_token_staleness``; both keep the denominators exact.
#
# Everything here is a pure function of tensors of one shape, [B, L] or [T].

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
    return torch.nn.functional.pad(chosen_logprobs(logits[:, :-1], tokens[:, 1:], temperatures[:, 1:]), (1, 0))


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """Return [...] float32 ``log_softmax(logits / T)`` [..., V] at ``tokens`` [...]; ``temperatures`` [...] are T."""
    scaled = logits.float() / temperatures[..., None]
    return scaled.gather(-1, tokens[..., None]).squeeze(-1) - scaled.logsumexp(-1)


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
