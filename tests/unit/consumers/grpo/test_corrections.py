"""The two corrections against versions written out in numpy, value and gradient."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.grpo import losses

LOW, HIGH, CAP, DUAL = 0.2, 0.3, 2.0, 3.0

torch.manual_seed(0)
# Ratios from 0.3 to 3, both signs of advantage, so that every branch of min and clip is taken.
THETA, OLD, MU = (torch.empty(3, 40, dtype=torch.float64).uniform_(-1.6, -0.4) for _ in range(3))
ADVANTAGES = torch.randn(3, 40, dtype=torch.float64)
MASK = torch.rand(3, 40) < 0.8


def clip(ratio: float) -> float:
    return min(max(ratio, 1 - LOW), 1 + HIGH)


def objective(ratio: float, advantage: float) -> float:
    plain = min(ratio * advantage, clip(ratio) * advantage)
    return max(plain, DUAL * advantage) if advantage < 0 else plain


def bypass_written_out(theta: float, mu: float, advantage: float) -> float:
    return -objective(math.exp(theta - mu), advantage)


def decoupled_written_out(theta: float, old: float, mu: float, advantage: float) -> float:
    return -min(math.exp(old - mu), CAP) * objective(math.exp(theta - old), advantage)


def expected(one: Callable[[int, int, float], float]) -> tuple[Tensor, Tensor]:
    """Value per token, and its derivative by log π_θ as a central difference."""
    value, slope = torch.zeros_like(THETA), torch.zeros_like(THETA)
    step = 1e-6
    for b, t in np.ndindex(*THETA.shape):
        if MASK[b, t]:
            value[b, t] = one(b, t, 0.0)
            slope[b, t] = (one(b, t, step) - one(b, t, -step)) / (2 * step)
    return value, slope


def bypass_expected() -> tuple[Tensor, Tensor]:
    return expected(
        lambda b, t, d: bypass_written_out(float(THETA[b, t]) + d, float(MU[b, t]), float(ADVANTAGES[b, t]))
    )


def decoupled_expected() -> tuple[Tensor, Tensor]:
    return expected(
        lambda b, t, d: decoupled_written_out(
            float(THETA[b, t]) + d, float(OLD[b, t]), float(MU[b, t]), float(ADVANTAGES[b, t])
        )
    )


def test_T9_bypass_is_its_formula() -> None:
    theta = THETA.clone().requires_grad_()
    found = losses.bypass(theta, MU, ADVANTAGES, MASK, LOW, HIGH)
    (slope,) = torch.autograd.grad(found.loss.sum(), theta)
    value, derivative = bypass_expected()
    torch.testing.assert_close(found.loss.detach(), value)
    torch.testing.assert_close(slope, derivative, atol=1e-6, rtol=1e-6)
    # Where the clip took the gradient, and only there.
    assert torch.equal(found.clipped, MASK & (derivative == 0))
    assert 0 < int(found.clipped.sum()) < int(MASK.sum())


def test_T9_decoupled_is_its_formula() -> None:
    theta, old, mu = (tensor.clone().requires_grad_() for tensor in (THETA, OLD, MU))
    found = losses.decoupled(theta, old, mu, ADVANTAGES, MASK, LOW, HIGH, CAP)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    value, derivative = decoupled_expected()
    torch.testing.assert_close(found.loss.detach(), value)
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, derivative, atol=1e-6, rtol=1e-6)
    # No gradient flows through the weight.
    assert old.grad is None
    assert mu.grad is None
    capped = MASK & (torch.exp(OLD - MU) > CAP)
    assert int(capped.sum()) > 0


def test_the_cap_of_a_weight_is_told_apart_from_the_clips_of_a_ratio() -> None:
    over = ((OLD - MU).exp() > CAP) & MASK
    assert 0 < int(over.sum()) < int(MASK.sum())
    decoupled = losses.decoupled(THETA, OLD, MU, ADVANTAGES, MASK, LOW, HIGH, CAP)
    assert torch.equal(decoupled.capped, over)
    assert not (losses.decoupled(OLD, OLD, MU, ADVANTAGES, MASK, LOW, HIGH, CAP).clipped).any()
    truncated = losses.truncated(OLD, MU, ADVANTAGES, MASK, CAP)
    assert torch.equal(truncated.capped, over)
    assert not losses.bypass(THETA, MU, ADVANTAGES, MASK, LOW, HIGH).capped.any()


def test_T9_with_one_policy_all_are_the_policy_gradient() -> None:
    for theta in (THETA.clone().requires_grad_(),):
        same = THETA.clone()
        for found in (
            losses.bypass(theta, same, ADVANTAGES, MASK, LOW, HIGH),
            losses.decoupled(theta, same, same, ADVANTAGES, MASK, LOW, HIGH, CAP),
        ):
            (slope,) = torch.autograd.grad(found.loss.sum(), theta)
            torch.testing.assert_close(slope, torch.where(MASK, -ADVANTAGES, 0.0))


def test_what_stands_outside_the_mask_cannot_reach_the_gradient() -> None:
    theta, mu = THETA.clone(), MU.clone()
    theta[~MASK], mu[~MASK] = 800.0, -math.inf
    theta.requires_grad_()
    found = losses.bypass(theta, mu, ADVANTAGES, MASK, LOW, HIGH)
    (slope,) = torch.autograd.grad(found.loss.sum(), theta)
    assert torch.isfinite(slope).all()
    assert not slope[~MASK].any()


def test_T6_logprobs_stand_at_their_token_and_are_scaled_by_temperature() -> None:
    logits, tokens = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    temperatures = torch.tensor([0.5, 2.0])
    found = losses.token_logprobs(logits, tokens, temperatures)
    for b in range(2):
        assert found[b, 0] == 0
        for t in range(1, 5):
            row = logits[b, t - 1].double() / float(temperatures[b])
            chances = np.exp(row.numpy()) / np.exp(row.numpy()).sum()
            assert abs(float(found[b, t]) - math.log(chances[tokens[b, t]])) < 1e-5


def test_temperatures_may_differ_within_a_row() -> None:
    logits, tokens = torch.randn(1, 6, 7), torch.randint(7, (1, 6))
    mixed = torch.tensor([[0.5, 0.5, 0.5, 2.0, 2.0, 2.0]])
    found = losses.token_logprobs(logits, tokens, mixed)
    half, double = (losses.token_logprobs(logits, tokens, torch.tensor([t])) for t in (0.5, 2.0))
    torch.testing.assert_close(found, torch.cat([half[:, :3], double[:, 3:]], dim=1))
