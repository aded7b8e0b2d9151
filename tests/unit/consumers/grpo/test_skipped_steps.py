"""A gradient that is not finite: the step is skipped and counted, and batches of them in a row end the run by name."""

import copy
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.config import Config, TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import checkpoint
from penstock.consumers.grpo.loop import TrainingLoop
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.metrics.steps import finite_or_none
from penstock.consumers.trainer import Trainer
from penstock.errors import PenstockError
from tests.batch_factory import make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo.sources import Source


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


def test_three_batches_in_a_row_stop_the_run_and_are_named() -> None:
    trainer = learner()
    for n, batch in enumerate((bad, bad, good, bad, bad), 1):
        trainer.step(batch(n))
        trainer.check_skipped()
    trainer.step(bad(6))
    with pytest.raises(PenstockError, match=r"3 batches in a row .* that is not finite: 4, 5, 6; no weight"):
        trainer.check_skipped()


@pytest.mark.parametrize("several", [{"epochs": 4}, {"minibatches": 3, "epochs": 4}])
def test_a_batch_counts_once_however_many_optimizer_steps_it_has(several: dict[str, int]) -> None:
    trainer = learner(**several)
    assert trainer.step(bad(1))["skipped_steps"] == 4
    trainer.check_skipped()
    assert trainer.skipped_in_a_row == [1]
    trainer.step(bad(1))
    assert trainer.skipped_in_a_row == [1], "a batch that comes again is the same one"
    trainer.step(good(2))
    assert trainer.skipped_in_a_row == []


def test_the_run_stops_behind_the_commit_and_the_checkpoint_so_that_no_bad_batch_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumers.grpo.step.MAX_SKIPPED", 2)
    config = Config.model_validate(
        {
            "run": "r",
            "directory": str(tmp_path),
            "redis": {"url": "redis://127.0.0.1:1"},
            "model": {"path": str(tmp_path)},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        }
    )
    source, trained = Source(config), learner(epochs=3)
    loop = TrainingLoop(config, cast(Trainer, source), trained)
    loop.train(bad(1))
    with pytest.raises(PenstockError, match="2 batches in a row"):
        loop.train(bad(2))
    assert source.done == ["commit 1", "publish 1", "commit 2", "publish 2", "checkpointed"]
    found = checkpoint.latest(tmp_path / "r" / "checkpoints", fits=lambda _: True)
    assert found is not None
    assert (found.step, found.learner[0]["skipped_in_a_row"]) == (2, [1, 2])
    rows = [json.loads(line) for line in (tmp_path / "r" / "steps.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [3, 3]


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
    second.step(bad(3))
    with pytest.raises(PenstockError, match="not finite: 1, 2, 3;"):
        second.check_skipped()
    # A checkpoint of when each optimizer step had an entry.
    second.load_state_dict(first.state_dict() | {"skipped_in_a_row": [2, 2, 2]})
    second.check_skipped()
    # A checkpoint of before there was such a count.
    old = {key: value for key, value in first.state_dict().items() if not key.startswith("skipped")}
    third = learner()
    third.load_state_dict(old)
    assert third.step(bad(3))["skipped_steps_total"] == 1


def test_what_is_not_finite_is_null_in_the_file() -> None:
    row = {"grad_norm": math.inf, "loss": math.nan, "step": 3, "lr": 0.1, "version": None}
    text = json.dumps({key: finite_or_none(value) for key, value in row.items()}, allow_nan=False)
    assert json.loads(text) == {"grad_norm": None, "loss": None, "step": 3, "lr": 0.1, "version": None}
