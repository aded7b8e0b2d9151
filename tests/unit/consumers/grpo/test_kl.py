"""The penalty on the distance to a reference policy: Schulman's estimators, in the loss and in the reward."""

import copy
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from penstock.config import Config, TrainerConfig
from penstock.config.trainer import KLEstimator
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import losses
from penstock.consumers.grpo.step import GRPO
from penstock.errors import ProtocolError
from penstock.names import REFERENCE_LOGPROBS
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_batch, make_samples, near_model, tiny_model, with_beside

WEIGHT = 0.3
NUMPY = {
    "k1": lambda away: -away,
    "k2": lambda away: away**2 / 2,
    "k3": lambda away: np.exp(away) - 1 - away,
}
#: By log π.
SLOPE = {"k1": lambda away: np.ones_like(away), "k2": lambda away: -away, "k3": lambda away: 1 - np.exp(away)}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_values_and_slopes_are_those_of_the_closed_formula(kind: KLEstimator) -> None:
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(4, 9, generator=generator, dtype=torch.float64).mul(3)
    reference = -torch.rand(4, 9, generator=generator, dtype=torch.float64).mul(3)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    policy.requires_grad_(True)

    found = losses.estimate(policy, reference, mask, kind)
    found.sum().backward()  # type: ignore[no-untyped-call]

    away = (reference - policy).detach().numpy()
    np.testing.assert_allclose(found.detach().numpy(), np.where(mask, NUMPY[kind](away), 0), atol=1e-12)
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.numpy(), np.where(mask, SLOPE[kind](away), 0), atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_two_of_them_are_unbiased(kind: KLEstimator) -> None:
    """Over all tokens by their probability, the mean is the KL itself."""
    policy, reference = (torch.randn(7, generator=torch.Generator().manual_seed(s)).log_softmax(0) for s in (1, 2))
    exact = float((policy.exp() * (policy - reference)).sum())
    mean = float((policy.exp() * losses.estimate(policy, reference, torch.ones(7, dtype=torch.bool), kind)).sum())
    assert mean == pytest.approx(exact, rel=1e-5)


def test_what_is_far_off_stays_finite_and_outside_the_mask_nothing_is_computed() -> None:
    policy = torch.tensor([-900.0, float("-inf"), -1.0], requires_grad=True)
    found = losses.estimate(policy, torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([True, False, True]), "k3")
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.0, 0.0], "beyond the limit, outside the mask, at the reference"


@cache
def draw_once() -> list[Sample]:
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=2, n=3)


def drawn() -> list[Sample]:
    return copy.deepcopy(draw_once())


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**({"lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e9, "correction": "bypass"} | changes))


@torch.no_grad()
def by_reference(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    model = tiny_model(3)
    return {one.id: logprobs_of(model, one.tokens, 1.0)[one.prompt_length :].float().numpy() for one in samples}


def learner(model: torch.nn.Module, settings: TrainerConfig, **more: Any) -> GRPO:
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), settings, **more)


def written_out(model: torch.nn.Module, samples: Sequence[Sample], kind: str, place: str) -> tuple[Tensor, float]:
    """Gradient of one step of bypass, token by token; and the mean of the estimate over the loss tokens."""
    said, num_tokens = by_reference(samples), sum(sum(one.generated) for one in samples)
    terms: dict[str, list[float]] = {}
    for one in samples:
        away = np.array(
            [said[one.id][t - one.prompt_length] - mu for t, mu in enumerate(one.logprobs) if one.generated[t]]
        )
        terms[one.id] = NUMPY[kind](away.astype(np.float64)).tolist()
    rewards = {one.id: float(one.reward or 0) - WEIGHT * (place == "reward") * sum(terms[one.id]) for one in samples}
    loss, penalties = torch.zeros((), dtype=torch.float64), []
    for one in samples:
        others = [rewards[other.id] for other in samples if other.job.id == one.job.id]
        advantage = (rewards[one.id] - statistics.mean(others)) / (statistics.stdev(others) + 1e-6)
        theta = logprobs_of(model, one.tokens, 1.0)
        for t, mu in enumerate(one.logprobs):
            if not one.generated[t]:
                continue
            ratio = torch.exp(theta[t] - mu)
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                objective = objective.clamp(min=3.0 * advantage)
            away = float(said[one.id][t - one.prompt_length]) - theta[t]
            penalty = {"k1": -away, "k2": away**2 / 2, "k3": away.exp() - 1 - away}[kind]
            penalties.append(float(penalty.detach()))
            loss = loss + ((WEIGHT * penalty if place == "loss" else 0) - objective) / num_tokens
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if place == "reward":
        penalties = [term for some in terms.values() for term in some]
    return gradient(model), statistics.mean(penalties)


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("own", [True, False], ids=["first policy", "frozen model"])
def test_T9_T10_T11_the_gradient_is_the_one_written_out(kind: str, place: str, own: bool) -> None:
    samples, model = drawn(), near_model()
    wanted, mean = written_out(copy.deepcopy(model), samples, kind, place)
    settings = config(kl={"weight": WEIGHT, "estimator": kind, "place": place})
    batch = make_batch(samples) if own else with_beside(samples, REFERENCE_LOGPROBS, by_reference(samples))
    trainer = learner(model, settings, max_samples=2, reference=tiny_model(3) if own else None)

    metrics = trainer.step(batch)

    assert float((gradient(model) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert metrics["ref_kl"] == pytest.approx(mean, rel=1e-4)


def test_T14_a_rank_sees_the_rewards_of_the_whole_batch() -> None:
    """What each of two ranks finds of its own samples is added up, and both have the advantages of one rank alone."""
    samples = drawn()
    settings = config(kl={"weight": WEIGHT, "place": "reward"})
    whole = make_batch(samples)
    learner(near_model(), settings, reference=tiny_model(3))._take_off_rewards(whole)
    halves: list[Tensor] = []

    def of_rank(rank: int, add_up: Callable[[Tensor], Any]) -> Batch:
        trainer = learner(near_model(), settings, reference=tiny_model(3))
        trainer._ranks.add_up = add_up  # type: ignore[method-assign]
        batch = make_batch(samples, dp_rank=rank, dp_size=2)
        trainer._take_off_rewards(batch)
        return batch

    # Each rank's sums are caught where they would be added up, and the other rank's are added then.
    for rank in (0, 1):
        of_rank(rank, lambda sums: halves.append(sums.clone()))
    assert all(half.any() for half in halves)
    for rank in (0, 1):
        batch = of_rank(rank, lambda sums: sums.copy_(halves[0] + halves[1]))
        np.testing.assert_allclose(batch.advantages, whole.advantages, rtol=1e-5)


def test_the_reference_is_never_trained() -> None:
    reference = tiny_model(3)
    before = copy.deepcopy(reference.state_dict())
    model = near_model()
    trainer = GRPO(
        model, torch.optim.SGD(model.parameters(), lr=0.5), config(lr=0.5, kl={"weight": 1.0}), reference=reference
    )
    trainer.step(make_batch(drawn()))
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    assert "reference" not in trainer.state_dict()


def test_a_batch_without_a_reference_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"trainer\.kl needs the side array 'reference_logprobs'"):
        learner(near_model(), config(kl={"weight": 1.0})).step(make_batch(drawn()))


def test_a_penalty_on_rewards_that_nobody_learns_from_is_refused() -> None:
    in_reward = {"weight": 0.1, "place": "reward"}
    config(kl=in_reward, distill={"with_rewards": True})
    config(kl=in_reward | {"place": "loss"}, distill={})
    with pytest.raises(ValidationError, match=r"distill alone ignores rewards: set kl\.place to loss"):
        config(kl=in_reward, distill={})


def test_two_that_make_advantages_are_refused() -> None:
    values = {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    kept = {"trainer": {"kl": {"weight": 0.1, "place": "reward"}}}
    Config.model_validate(values | kept)
    with pytest.raises(ValidationError, match=r"trainer\.kl\.place reward has no effect with hooks\.rewards"):
        Config.model_validate(values | kept | {"hooks": {"rewards": "m:f"}})
