"""Estimate the distance of the policy to a reference policy: Schulman's estimators of KL(π || reference), per token.

With log r = log reference - log π of a token sampled from π:

- ``k1``: -log r; unbiased, of high variance, negative at times. Its gradient has mean 0: in the loss it is noise
- ``k2``: (log r)^2 / 2; biased, never negative; its gradient is that of the KL, on policy
- ``k3``: r - 1 - log r; unbiased, never negative; GRPO's penalty (arXiv 2402.03300, equation 4)

Source: Schulman 2020, "Approximating KL Divergence". Tokens of an older policy are treated as samples of π, as GRPO
does. Every log r is held within ±``losses.LOG_RATIO_LIMIT``; beyond, no gradient flows.

Pure functions of tensors of one shape, [B, L] or [T].
"""

from torch import Tensor

from penstock.config.trainer import KLEstimator
from penstock.consumers.grpo.losses import log_ratio


def estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: KLEstimator) -> Tensor:
    """Return the estimate of each token, 0 where the mask is False.

    Args:
        logprobs: log π; may carry a gradient.
        reference: log-probabilities of the reference; carries none.
    """
    away, _ = log_ratio(reference.detach(), logprobs, mask)
    if kind == "k1":
        return -away
    if kind == "k2":
        return away.square() / 2
    return away.expm1() - away
