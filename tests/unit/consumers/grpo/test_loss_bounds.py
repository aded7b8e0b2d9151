"""What one broken token may do to a step, and which metric tells of it: dual clip, limit on log ratios, metrics."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.grpo import losses
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.totals import Totals
from penstock.records.sample import Sample
from tests.batch_factory import make_batch, make_samples, tiny_model

Array = NDArray[np.float64]

LOW, HIGH, CAP = 0.2, 0.28, 2.0
SHAPE = (6, 40)

torch.manual_seed(3)
# Log ratios from -30 to 30, so that every branch of clip, dual clip and limit is taken with both signs of advantage.
MU = torch.empty(SHAPE, dtype=torch.float64).uniform_(-3.0, -0.1)
THETA = MU + torch.empty(SHAPE, dtype=torch.float64).uniform_(-1, 1) * torch.tensor([0.3, 2, 5, 10, 30, 30])[:, None]
OLD = MU + torch.empty(SHAPE, dtype=torch.float64).uniform_(-1, 1) * torch.tensor([0.1, 1, 1, 3, 25, 30])[:, None]
ADVANTAGES = torch.randn(SHAPE, dtype=torch.float64)
MASK = torch.rand(SHAPE) < 0.8


def bounded_np(ratio: float, advantage: float, dual: float | None) -> tuple[float, float]:
    """Objective of one token and its slope by the ratio."""
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    value, slope = ratio * advantage, advantage
    if clipped * advantage < value:
        value, slope = clipped * advantage, 0.0
    if dual is not None and advantage < 0 and value < dual * advantage:
        value, slope = dual * advantage, 0.0
    return value, slope


def ppo_np(theta: Array, proximal: Array, dual: float | None) -> tuple[Array, Array]:
    """Loss per token and its derivative by log π_θ; nothing of it is taken from the code."""
    loss, slope = np.zeros(SHAPE), np.zeros(SHAPE)
    for at in np.ndindex(*SHAPE):
        if MASK[at]:
            away = theta[at] - proximal[at]
            ratio = math.exp(min(max(away, -20.0), 20.0))
            value, by_ratio = bounded_np(ratio, float(ADVANTAGES[at]), dual)
            loss[at] = -value
            slope[at] = -by_ratio * ratio if abs(away) <= 20 else 0.0
    return loss, slope


def gspo_np(theta: Array, proximal: Array, dual: float | None) -> tuple[Array, Array]:
    loss, slope = np.zeros(SHAPE), np.zeros(SHAPE)
    for row in range(SHAPE[0]):
        drawn = np.flatnonzero(MASK[row].numpy())
        away = theta[row, drawn] - proximal[row, drawn]
        s = math.exp(float(np.clip(away, -20, 20).mean()))
        for t in drawn:
            value, by_ratio = bounded_np(s, float(ADVANTAGES[row, t]), dual)
            loss[row, t] = -value
            slope[row, drawn] -= by_ratio * s / len(drawn) * (abs(away) <= 20)
    return loss, slope


def cispo_np(theta: Array, proximal: Array, dual: float | None) -> tuple[Array, Array]:
    weight = np.clip(np.exp(np.clip(theta - proximal, -20, 20)), 1 - LOW, 1 + HIGH) * MASK.numpy()
    return -weight * ADVANTAGES.numpy() * theta, -weight * ADVANTAGES.numpy()


NUMPY = {"ppo": ppo_np, "gspo": gspo_np, "cispo": cispo_np}


@pytest.mark.parametrize("dual", [3.0, 1.5, None])
@pytest.mark.parametrize("name", losses.RATIO_LOSSES)
def test_T9_bounds_are_those_of_the_formula_with_ratios_of_any_size(name: str, dual: float | None) -> None:
    theta = THETA.clone().requires_grad_()
    found = losses.RATIO_LOSSES[name](theta, MU, ADVANTAGES, MASK, LOW, HIGH, None, dual)
    (slope,) = torch.autograd.grad(found.loss.sum(), theta)
    loss, wanted = NUMPY[name](THETA.numpy(), MU.numpy(), dual)
    np.testing.assert_allclose(found.loss.detach().numpy(), loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slope.numpy(), wanted, rtol=1e-9, atol=1e-12)
    away = (THETA - MU).abs() > 20
    assert torch.equal(found.clamped, away & MASK)
    assert bool(found.clamped.any())


@pytest.mark.parametrize("name", losses.RATIO_LOSSES)
def test_T9_decoupled_bounds_its_weight_and_its_ratio(name: str) -> None:
    theta = THETA.clone().requires_grad_()
    found = losses.decoupled(
        theta, OLD, MU, ADVANTAGES, MASK, LOW, HIGH, CAP, loss=losses.RATIO_LOSSES[name], dual_clip=3.0
    )
    (slope,) = torch.autograd.grad(found.loss.sum(), theta)
    loss, by_theta = NUMPY[name](THETA.numpy(), OLD.numpy(), 3.0)
    weight = np.minimum(np.exp(np.clip((OLD - MU).numpy(), -20, 20)), CAP)
    np.testing.assert_allclose(found.loss.detach().numpy(), weight * loss, rtol=1e-9, atol=1e-12)
    if name != "gspo":  # whose slope mixes the weights of a sample's tokens; test_losses has it by differences
        np.testing.assert_allclose(slope.numpy(), weight * by_theta, rtol=1e-9, atol=1e-12)
    assert torch.equal(found.clamped, MASK & (((OLD - MU).abs() > 20) | ((THETA - OLD).abs() > 20)))


def test_clips_tell_low_high_and_dual_apart() -> None:
    theta = torch.tensor([[0.5, 1.0, 1.5, 3.5, 0.5, 1.5, 3.5, 3.5]]).log()
    advantages = torch.tensor([[-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True] * 7 + [False]])
    found = losses.ppo(theta, torch.zeros(1, 8), advantages, mask, 0.2, 0.2)
    assert found.low[0].tolist() == [True] + [False] * 7
    assert found.dual[0].tolist() == [False, False, False, True] + [False] * 4
    assert found.high[0].tolist() == [False] * 5 + [True, True, False]
    assert torch.equal(found.clipped, found.low | found.high | found.dual)
    weighed = losses.cispo(theta, torch.zeros(1, 8), advantages, mask, 0.4, 2.0)
    assert weighed.low[0].tolist() == [True, False, False, False, True, False, False, False]
    assert weighed.high[0].tolist() == [False, False, False, True, False, False, True, False]
    capped = losses.truncated(theta, torch.zeros(1, 8), advantages, mask, 2.0)
    assert capped.high[0].tolist() == [False, False, False, True, False, False, True, False]


# --- one broken token -------------------------------------------------------------------------------------------------


def answers() -> list[Sample]:
    return make_samples({5: tiny_model(2)}, groups=4, n=4)


def broken(nats: float) -> list[Sample]:
    """16 answers; one token of one that loses has a behaviour logprob that is too low by ``nats``."""
    samples = copy.deepcopy(answers())
    group = [sample for sample in samples if sample.job.id == samples[0].job.id]
    worst = min(group, key=lambda sample: float(sample.reward or 0))
    worst.logprobs[-2] -= nats
    return samples


def trained(samples: list[Sample], **changes: Any) -> dict[str, float]:
    model = tiny_model(2)
    config = TrainerConfig(**({"lr": 0.0, "warmup_steps": 0, "max_grad_norm": 1e9, "correction": "bypass"} | changes))
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config).step(make_batch(samples, train_version=5))


@pytest.mark.parametrize("nats", [5.0, 10.0, 60.0])
def test_T9_one_losing_token_cannot_rule_the_gradient(nats: float) -> None:
    honest, found = trained(answers()), trained(broken(nats))
    assert found["grad_norm"] < 1.5 * honest["grad_norm"]
    assert found["clip_dual_frac"] == pytest.approx(1 / found["tokens"])
    assert found["clip_frac"] == pytest.approx(found["clip_dual_frac"])
    assert found["ratio_clamped_frac"] == pytest.approx((nats > 20) / found["tokens"])
    assert found["ratio_max"] == pytest.approx(math.exp(min(nats, 20.0)), rel=1e-3)
    assert honest["clip_frac"] == honest["ratio_clamped_frac"] == 0
    unbounded = trained(broken(nats), dual_clip=None)["grad_norm"]
    assert unbounded > 5 * honest["grad_norm"] or nats > 20  # beyond the limit no gradient flows


def test_dual_clip_is_three_by_default_and_null_switches_it_off() -> None:
    assert TrainerConfig().dual_clip == 3.0
    assert TrainerConfig(dual_clip=None).dual_clip is None
    for value in (1.0, 0.0, -3.0, math.nan):
        with pytest.raises(ValidationError, match="dual_clip"):
            TrainerConfig(dual_clip=value)


# --- metrics of the ratio to the behaviour policy ---------------------------------------------------------------------


def totals_of(theta: Tensor, mu: Tensor, mask: Tensor, parts: int = 1) -> dict[str, float]:
    """As several micro-batches would add up."""
    totals = Totals(torch.device("cpu"))
    of = losses.reinforce(theta, torch.ones_like(theta), mask)
    for rows in torch.arange(len(theta)).chunk(parts):
        part = losses.TokenLoss(*(tensor[rows] for tensor in of))
        staleness = torch.zeros_like(theta[rows], dtype=torch.int32)
        totals.add(mask[rows], staleness, theta[rows], mu[rows], part, theta[rows])
    return totals.reduce(1, None)


@pytest.mark.parametrize("spread", [1e-5, 1e-2, 0.3, 5.0])
def test_ess_k3_and_quantiles_are_those_of_the_ratios(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mu = torch.empty(40, 50).uniform_(-4, -1, generator=generator)
    theta = mu + spread * torch.randn(40, 50, generator=generator)
    mask = torch.rand(40, 50, generator=generator) < 0.7
    away = (theta - mu)[mask].double().numpy()
    ratio = np.exp(away)
    for parts in (1, 7):
        found = totals_of(theta, mu, mask, parts)
        assert found["ess"] == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
        assert found["k3"] == pytest.approx((ratio - 1 - away).mean())
        assert found["ratio_min"] == pytest.approx(ratio.min())
        assert found["ratio_max"] == pytest.approx(ratio.max())
        for name, share in {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}.items():
            wanted = np.quantile(away, share, method="inverted_cdf")
            assert math.log(found[name]) == pytest.approx(wanted, rel=4e-3, abs=4e-7)


def test_on_policy_the_metrics_say_so() -> None:
    found = trained(answers())
    assert found["ess"] == pytest.approx(1.0, abs=1e-6)
    assert found["k3"] == pytest.approx(0.0, abs=1e-8)
    assert [found[name] for name in ("ratio_min", "ratio_p01", "ratio_p50", "ratio_p99", "ratio_max")] == pytest.approx(
        [1.0] * 5, abs=1e-4
    )
    off = trained(make_samples({4: tiny_model(1)}, groups=2, n=4))
    assert off["ess"] < 0.9
    assert off["k3"] > 0.05
    assert off["ratio_min"] < off["ratio_p01"] <= off["ratio_p50"] < off["ratio_p99"] <= off["ratio_max"] * 1.01


def test_a_nan_breaks_no_metric() -> None:
    theta, mu, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    theta[0, 1] = torch.nan
    assert totals_of(theta, mu, mask)["ratio_p50"] == pytest.approx(1.0, abs=1e-6)
