"""``hooks.postprocess``: what a function makes of the samples of a rank is what is trained (T8, T10), and no more."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config import Config, TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.hooks import TrainingHooks
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.train_rows import TrainRow
from penstock.errors import HookError
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_batch, make_samples, near_model, tiny_model

HERE = "tests.unit.consumers.grpo.test_train_rows"
TEMPERATURE = 0.7
#: Sums over the loss tokens of everything, so that a row, a mask or an advantage too many is seen.
SETTINGS: dict[str, Any] = {"lr": 0.0, "warmup_steps": 0, "max_grad_norm": 1e9}


def samples() -> list[Sample]:
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, temperature=TEMPERATURE)


def without_last_tokens(batch: Batch, rows: list[TrainRow]) -> None:
    for row in rows:
        row.loss_mask[-1] = False


def without_last_tokens_as_slime(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    assert (args.limit, rollout_id) == (3, 0)
    for mask in rollout_data["loss_masks"]:
        mask[-1] = 0


def doubled(batch: Batch, rows: list[TrainRow]) -> None:
    for row in rows:
        row.advantages = 2 * row.advantages


def doubled_as_slime(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [2 * one for one in rollout_data["advantages"]]


def nothing(batch: Batch, rows: list[TrainRow]) -> None: ...


def all_off(batch: Batch, rows: list[TrainRow]) -> None:
    for row in rows:
        row.loss_mask[:] = False


def loss_on_the_prompt(batch: Batch, rows: list[TrainRow]) -> None:
    rows[0].loss_mask[0] = True


def too_short(batch: Batch, rows: list[TrainRow]) -> None:
    rows[0].loss_mask = rows[0].loss_mask[:-1]


def no_number(batch: Batch, rows: list[TrainRow]) -> None:
    rows[1].advantages[-1] = np.nan


def raises(batch: Batch, rows: list[TrainRow]) -> None:
    raise SystemExit(3)


def forgets_a_key(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del rollout_data["advantages"]


def hooks(name: str) -> TrainingHooks:
    return TrainingHooks(
        Config.model_validate(
            {
                "run": "demo",
                "model": {"path": "m"},
                "data": {"train": [{"name": "d", "path": str(Path("d.jsonl"))}]},
                "hooks": {"postprocess": f"{HERE}:{name}", "args": {"limit": 3}},
            }
        )
    )


def learner(name: str | None, **changes: Any) -> GRPO:
    model = near_model()
    config = TrainerConfig(**SETTINGS | changes)
    found = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config, max_samples=4)
    found.postprocess = None if name is None else hooks(name).postprocess
    return found


def trained(name: str | None, drawn: Sequence[Sample], **changes: Any) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the last optimizer step, and metrics."""
    trainer = learner(name, **changes)
    metrics = trainer.step(make_batch(drawn, advantage="rloo"))
    return gradient(trainer.model), metrics


@pytest.mark.parametrize("settings", [{}, {"aggregation": "sample"}, {"correction": "decoupled", "minibatches": 3}])
def test_one_that_changes_nothing_changes_nothing(settings: dict[str, Any]) -> None:
    plain, told = trained(None, samples(), **settings)
    found, seen = trained("nothing", samples(), **settings)
    torch.testing.assert_close(found, plain)
    assert seen == pytest.approx(told)


@pytest.mark.parametrize("name", ["without_last_tokens", "without_last_tokens_as_slime"])
@pytest.mark.parametrize("settings", [{}, {"minibatches": 3}])
def test_T10_tokens_that_it_takes_the_loss_off_are_in_no_sum_and_no_denominator(
    name: str, settings: dict[str, Any]
) -> None:
    """As if they had been drawn without loss."""
    masked = samples()
    for one in masked:
        one.loss_mask[-1] = 0
    expected, told = trained(None, masked, **settings)
    found, seen = trained(name, samples(), **settings)
    torch.testing.assert_close(found, expected)
    assert seen["tokens"] == told["tokens"] < trained(None, samples(), **settings)[1]["tokens"]


@pytest.mark.parametrize("name", ["doubled", "doubled_as_slime"])
def test_advantages_are_those_that_it_gives(name: str) -> None:
    """Of a loss in which nothing is clipped."""
    plain, _ = trained(None, samples(), loss="reinforce")
    found, _ = trained(name, samples(), loss="reinforce")
    torch.testing.assert_close(found, 2 * plain)


def test_it_sees_each_sample_once_with_the_logprobs_of_the_policy() -> None:
    seen: list[TrainRow] = []
    trainer = learner(None, minibatches=2, epochs=2)
    trainer.postprocess = lambda batch, rows: seen.extend(rows)
    drawn = samples()
    trainer.step(make_batch(drawn))
    assert [(row.index, row.tokens.tolist()) for row in seen] == [(i, one.tokens) for i, one in enumerate(drawn)]
    for row, one in zip(seen, drawn, strict=True):
        expected = logprobs_of(trainer.model, one.tokens, TEMPERATURE).detach().numpy()
        assert row.old_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
        assert row.loss_mask.tolist() == [bool(value) for value in one.loss_mask]
        assert row.versions[row.generated].tolist() == [value for value in one.versions if value >= 0]


def test_where_it_takes_all_loss_away_nothing_is_trained() -> None:
    trainer = learner("all_off", minibatches=2)
    assert trainer.step(make_batch(samples()))["skipped"] == 1.0
    assert trainer.steps == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loss_on_the_prompt", "put loss on tokens of sample toy/0/0/0 that had none"),
        ("too_short", "made a loss mask of sample toy/0/0/0 without a 0 or 1 a token"),
        ("no_number", "gave advantages of sample toy/0/0/1 that are no finite number for each token"),
        ("raises", "raised SystemExit"),
        ("forgets_a_key", "left no advantages with an entry for each sample"),
    ],
)
def test_what_it_may_not_do_is_a_sentence_and_nothing_is_trained(name: str, said: str) -> None:
    trainer = learner(name)
    with pytest.raises(HookError, match=said) as raised:
        trainer.step(make_batch(samples()))
    assert f"hooks.postprocess {HERE}:{name}" in str(raised.value)
    assert trainer.steps == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
