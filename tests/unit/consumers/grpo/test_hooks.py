"""Functions of section ``hooks`` in the trainer: they shape what is trained alike on every rank, and fail by name."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.config import Config, TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.hooks import TrainingHooks, check_alike
from penstock.consumers.grpo.loop import TrainingLoop
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, HookError
from tests.batch_factory import make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo import hook_functions
from tests.unit.consumers.grpo.sources import Source

HERE = "tests.unit.consumers.grpo.hook_functions"


def config(folder: Path = Path("runs"), **hooks: Any) -> Config:
    named = {key: f"{HERE}:{name}" if isinstance(name, str) else name for key, name in hooks.items()}
    values = {"run": "r", "directory": str(folder), "model": {"path": "m"}, "hooks": named}
    data = {"train": [{"name": "d", "path": "d.jsonl"}], "eval": [{"name": "e", "path": "e.jsonl"}]}
    return Config.model_validate(values | {"data": data})


def batch(rank: int = 0, size: int = 1) -> Batch:
    return make_batch(make_samples({5: tiny_model(2)}), dp_rank=rank, dp_size=size)


def test_T11_rewards_become_advantages_of_the_whole_batch_on_every_rank() -> None:
    hooks, whole = TrainingHooks(config(rewards="ranks_of")), batch()
    digest = hooks.prepare(whole)
    wanted = hook_functions.ranks_of(whole)
    assert whole.advantages.tolist() == wanted
    arrays = whole.arrays()
    drawn = arrays["generated"]
    assert (arrays["advantages"][drawn] == np.repeat(wanted, drawn.sum(1))).all()
    shares = [batch(rank, 2) for rank in range(2)]
    assert {hooks.prepare(one) for one in shares} == {digest}


def test_a_reward_post_process_of_slimes_signature_gives_what_is_trained_on() -> None:
    whole = batch()
    TrainingHooks(config(rewards="post_process", args={"scale": 2.0})).prepare(whole)
    assert whole.advantages.tolist() == [2.0 * row.reward for row in whole.all_rows]


def test_T10_samples_that_are_taken_out_bear_no_loss_and_are_in_no_denominator() -> None:
    whole, before = batch(), batch()
    advantages = before.advantages.tolist()
    TrainingHooks(config(samples="first_of_each")).prepare(whole)
    first = [i for i, row in enumerate(whole.all_rows) if i == 0 or whole.all_rows[i - 1].job != row.job]
    lost = sum(whole.all_rows[i].num_loss for i in first)
    assert whole.counts["loss_tokens"] == before.counts["loss_tokens"] - lost
    assert whole.counts["samples"] == before.counts["samples"]
    arrays = whole.arrays()
    assert arrays["loss_mask"].sum() == whole.counts["loss_tokens"]
    assert not arrays["loss_mask"][first].any()
    assert whole.advantages.tolist() == advantages, "they stay in their groups"


@pytest.mark.parametrize("name", ["first_of_each", "second"])
def test_T10_two_ranks_divide_by_what_is_left_of_both(name: str) -> None:
    hooks, whole = TrainingHooks(config(samples=name)), batch()
    hooks.prepare(whole)
    shares = [batch(rank, 2) for rank in range(2)]
    assert {hooks.prepare(one) for one in shares} == {hooks.prepare(batch())}
    assert [one.counts for one in shares] == [whole.counts] * 2
    assert sum(int(one.arrays()["loss_mask"].sum()) for one in shares) == whole.counts["loss_tokens"]


@pytest.mark.parametrize(
    ("hook", "name", "says"),
    [
        ("rewards", "too_few", "needs a finite advantage for each of 12"),
        ("rewards", "too_large", "needs a finite advantage for each of 12"),
        ("samples", "none_such", "invalid indices:"),
        ("samples", "exits", "raised SystemExit: 3"),
    ],
)
def test_what_cannot_be_taken_ends_the_run_with_the_hooks_name(hook: str, name: str, says: str) -> None:
    with pytest.raises(HookError, match=rf"hooks\.{hook} {HERE}:{name} .*{says}"):
        TrainingHooks(config(**{hook: name})).prepare(batch())


def test_T14_ranks_that_were_told_different_things_stop() -> None:
    check_alike(["a", "a"])
    with pytest.raises(HookError, match="answered differently on different ranks"):
        check_alike(["a", "b"])


def test_a_hook_that_the_trainer_cannot_call_is_refused_at_its_start() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.rollout_log .*second has the signature \(batch"):
        TrainingHooks(config(rollout_log="second"))


def test_evaluations_are_told_once_in_the_trainers_own_thread() -> None:
    hook_functions.told.clear()
    hooks = TrainingHooks(config(eval_log="log_evaluation"))
    hooks.note_evaluation([{"version": 1, "dataset": "a"}, {"version": 1, "dataset": "b"}])
    hooks.note_evaluation([{"version": 2, "dataset": "a"}])
    assert hook_functions.told == []
    hooks.tell_evaluations()
    hooks.tell_evaluations()
    assert hook_functions.told == [(1, ["a", "b"]), (2, ["a"])]


@pytest.mark.parametrize("name", ["log_step", "log_rollout_data"])
def test_the_loop_trains_what_the_hooks_leave_and_tells_of_it(tmp_path: Path, name: str) -> None:
    hook_functions.told.clear()
    model = tiny_model(2)
    learner = GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), TrainerConfig(warmup_steps=0))
    made = config(tmp_path, samples="second", rollout_log=name)
    one = batch()

    TrainingLoop(made, cast(Trainer, Source(made)), learner).train(one)

    row = json.loads((made.run_dir / "steps.jsonl").read_text())
    assert row["tokens"] > 0
    assert one.counts["loss_tokens"] < batch().counts["loss_tokens"]
    ((step, *_),) = hook_functions.told
    assert step == 1


def test_a_hook_that_raises_leaves_the_batch_untrained(tmp_path: Path) -> None:
    model = tiny_model(2)
    learner = GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), TrainerConfig(warmup_steps=0))
    made = config(tmp_path, samples="exits")
    with pytest.raises(HookError, match="raised SystemExit: 3"):
        TrainingLoop(made, cast(Trainer, Source(made)), learner).train(batch())
    assert learner.steps == 0
