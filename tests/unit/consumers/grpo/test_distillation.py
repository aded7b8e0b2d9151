"""On-policy distillation against its loss written out token by token, in double precision: values and gradients."""

import copy
import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.config.trainer import DistillConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.losses import distilled, reverse_kl
from penstock.consumers.grpo.step import GRPO
from penstock.errors import ProtocolError
from penstock.names import TEACHER_LOGPROBS
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_samples, near_model, tiny_model, with_beside

CAP = 2.0


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**({"lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e9, "distill": {}} | changes))


@cache
def draw_once() -> list[Sample]:
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=2, n=3)


def drawn() -> list[Sample]:
    return copy.deepcopy(draw_once())


@torch.no_grad()
def taught(samples: Sequence[Sample], seed: int = 7) -> dict[str, NDArray[Any]]:
    """What a teacher says of the response of each sample."""
    model = tiny_model(seed)
    return {one.id: logprobs_of(model, one.tokens, 1.0)[one.prompt_length :].float().numpy() for one in samples}


def batch_of(samples: list[Sample], **changes: Any) -> Batch:
    return with_beside(samples, TEACHER_LOGPROBS, taught(samples), **changes)


def written_out(model: torch.nn.Module, samples: Sequence[Sample], settings: TrainerConfig) -> Tensor:
    """The gradient: -r A clipped (bypass), -w A log π (truncated), with A of each token; divided by all loss tokens."""
    assert settings.distill is not None
    teacher, num_tokens = taught(samples), sum(sum(one.generated) for one in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for one in samples:
        rewards = [float(other.reward or 0) for other in samples if other.job.id == one.job.id]
        of_reward = (float(one.reward or 0) - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        theta = logprobs_of(model, one.tokens, 1.0)
        for t, mu in enumerate(one.logprobs):
            if not one.generated[t]:
                continue
            policy = mu if settings.correction == "bypass" else float(theta[t].detach())
            kl = policy - float(teacher[one.id][t - one.prompt_length])
            advantage = (of_reward if settings.distill.with_rewards else 0.0) - settings.distill.weight * kl
            if settings.correction == "truncated":
                objective = min(math.exp(float(theta[t].detach()) - mu), CAP) * advantage * theta[t]
            else:
                ratio = torch.exp(theta[t] - mu)
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if advantage < 0:
                    objective = objective.clamp(min=3.0 * advantage)
            loss = loss - objective / num_tokens
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return gradient(model)


@pytest.mark.parametrize("distill", [{}, {"weight": 0.3}, {"weight": 0.3, "with_rewards": True}])
@pytest.mark.parametrize("of", [{"correction": "bypass"}, {"loss": "reinforce"}], ids=["bypass", "truncated"])
@pytest.mark.parametrize("limits", [{}, {"max_samples": 3}])
def test_T9_T10_the_gradient_is_the_one_written_out(
    distill: dict[str, Any], of: dict[str, Any], limits: dict[str, Any]
) -> None:
    samples, model, settings = drawn(), near_model(), config(distill=distill, **of)
    wanted = written_out(copy.deepcopy(model), samples, settings)

    GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), settings, **limits).step(batch_of(samples))

    assert float((gradient(model) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_the_metric_is_the_mean_over_the_loss_tokens() -> None:
    samples, model = drawn(), near_model()
    teacher = taught(samples)
    terms = [
        mu - float(teacher[one.id][t - one.prompt_length])
        for one in samples
        for t, mu in enumerate(one.logprobs)
        if one.generated[t]
    ]

    metrics = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config(correction="bypass"), max_samples=2).step(
        batch_of(samples)
    )

    assert metrics["teacher_kl"] == pytest.approx(np.mean(terms), rel=1e-5)


def test_outside_the_mask_and_beyond_the_limit() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0])
    teacher = torch.tensor([-200.0, float("-inf"), -1.5])
    away = reverse_kl(policy, teacher, torch.tensor([True, False, True]))
    assert away.tolist() == [20.0, 0.0, 0.5]
    found = distilled(torch.tensor([1.0, 1.0, 1.0]), away, DistillConfig(weight=2.0, with_rewards=True))
    assert found.tolist() == [-39.0, 1.0, 0.0]


def test_a_batch_without_a_teacher_is_refused() -> None:
    samples = drawn()
    batch = with_beside(samples, "routed_experts", {})
    model = near_model()
    with pytest.raises(ProtocolError, match=r"trainer\.distill needs the side array 'teacher_logprobs'"):
        GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config()).step(batch)
