"""A gradient that is not finite: the step is skipped and counted, and a run of them ends with the batches' names."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from consumers.batch import Batch
from consumers.grpo import GRPO
from penstock.config import TrainerConfig
from penstock.errors import PenstockError
from tests.batch_factory import make_batch, make_samples, tiny_model


def good(n: int = 1) -> Batch:
    return make_batch(make_samples({5: tiny_model(2)}), n=n)


def bad(n: int = 1) -> Batch:
    """One reward is so far off that the square of the gradient is no float32 any more."""
    samples = copy.deepcopy(make_samples({5: tiny_model(2)}))
    samples[3].reward = -1e30
    return make_batch(samples, advantage="dr_grpo", n=n)


def learner(**changes: Any) -> GRPO:
    model = tiny_model(2)
    config = TrainerConfig(**({"lr": 0.01, "warmup_steps": 0} | changes))
    return GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)


def weights(trainer: GRPO) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).clone()


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    trainer = learner()
    before = weights(trainer)
    metrics = trainer.step(bad(7))
    assert torch.equal(weights(trainer), before)
    assert (metrics["skipped"], metrics["skipped_steps"], metrics["skipped_steps_total"]) == (1, 1, 1)
    assert metrics["optimizer_steps"] == trainer.steps == 0
    assert not math.isfinite(metrics["grad_norm"])
    metrics = trainer.step(good(8))
    assert not torch.equal(weights(trainer), before)
    assert bool(torch.isfinite(weights(trainer)).all())
    assert (metrics["skipped"], metrics["skipped_steps"], metrics["skipped_steps_total"]) == (0, 0, 1)


def test_three_in_a_row_stop_the_run_and_are_named() -> None:
    trainer = learner()
    trainer.step(bad(1))
    trainer.step(bad(2))
    trainer.step(good(3))
    trainer.step(bad(4))
    trainer.step(bad(5))
    with pytest.raises(PenstockError, match=r"3 optimizer steps in a row .* of batch 4, 5, 6; no weight"):
        trainer.step(bad(6))


def test_how_many_is_configurable() -> None:
    one = learner(max_skipped_steps=1)
    with pytest.raises(PenstockError, match="of batch 9;"):
        one.step(bad(9))
    never = learner(max_skipped_steps=None)
    for n in range(1, 6):
        never.step(bad(n))
    with pytest.raises(ValidationError, match="max_skipped_steps"):
        TrainerConfig(max_skipped_steps=0)


def test_minibatches_are_skipped_one_by_one() -> None:
    trainer = learner(minibatches=3)
    metrics = trainer.step(bad())
    assert metrics["skipped_steps"] == 1
    assert metrics["optimizer_steps"] == trainer.steps == 2
    assert metrics["skipped"] == 0
    assert bool(torch.isfinite(weights(trainer)).all())


def test_a_restored_trainer_knows_what_was_skipped_before() -> None:
    first, second = learner(), learner()
    first.step(bad(1))
    first.step(bad(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.raises(PenstockError, match="of batch 1, 2, 3;"):
        second.step(bad(3))
    # A checkpoint of before there was such a count.
    old = {key: value for key, value in first.state_dict().items() if not key.startswith("skipped")}
    third = learner()
    third.load_state_dict(old)
    assert third.step(bad(3))["skipped_steps_total"] == 1


def test_what_is_not_finite_is_null_in_the_file() -> None:
    from consumers.main import _told

    row = {"grad_norm": math.inf, "loss": math.nan, "step": 3, "lr": 0.1, "version": None}
    text = json.dumps({key: _told(value) for key, value in row.items()}, allow_nan=False)
    assert json.loads(text) == {"grad_norm": None, "loss": None, "step": 3, "lr": 0.1, "version": None}
