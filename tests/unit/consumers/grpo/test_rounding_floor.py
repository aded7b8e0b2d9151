"""What rounding alone makes of logprobs is measured at the start, and the metric is compared with it."""

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from consumers.batch.batch import Batch
from consumers.grpo.loop import TrainingLoop
from consumers.grpo.rounding_floor import LEAST_FLOOR, RoundingFloor, engine_dtype, rounding_of
from consumers.grpo.step import GRPO
from consumers.trainer import Trainer
from penstock.config import Config, TrainerConfig
from tests.batch_factory import logprobs_of, make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo.sources import Source


def learner(**changes: Any) -> GRPO:
    model = tiny_model(2)
    config = TrainerConfig.model_validate({"lr": 1e-4, "warmup_steps": 0, **changes})
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config)


def batch(n: int = 1) -> Batch:
    return make_batch(make_samples({5: tiny_model(2)}), train_version=5, n=n)


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 40}])
def test_the_floor_is_the_mean_difference_of_loss_tokens_in_both_types(limits: dict[str, int]) -> None:
    samples = make_samples({5: tiny_model(2)})
    exact, rounded, away = tiny_model(2), tiny_model(2).to(torch.bfloat16), []
    with torch.no_grad():
        for sample in samples:
            found = [logprobs_of(model, sample.tokens, 1.0).float() for model in (exact, rounded)]
            away += (found[0] - found[1]).abs()[torch.tensor(sample.generated).bool()].tolist()

    measured = rounding_of(learner(**limits), make_batch(samples, train_version=5), torch.bfloat16)

    assert measured == pytest.approx(sum(away) / len(away), rel=0.25)
    assert 1e-3 < measured < 1.0
    assert rounding_of(learner(), batch(), torch.float32) == 0.0


def test_the_floor_is_measured_once_and_never_below_what_kernels_differ_by(caplog: pytest.LogCaptureFixture) -> None:
    floor = RoundingFloor(torch.float32)
    with caplog.at_level(logging.INFO, "consumers.grpo.rounding_floor"):
        floor.measure(learner(), batch())
        floor.measure(learner(), batch())
    assert floor.value == LEAST_FLOOR
    assert caplog.messages == [
        "logprobs differ by 1e-05 per token through rounding alone (float32 against engines in float32)"
    ]


def test_a_batch_without_a_loss_token_is_not_the_one_that_is_measured() -> None:
    samples = make_samples({5: tiny_model(2)})
    for sample in samples:
        sample.loss_mask = [0] * len(sample.tokens)
    floor = RoundingFloor(torch.bfloat16)
    floor.measure(learner(), make_batch(samples))
    assert floor.value is None
    floor.compare({"logprob_diff_fresh_mean": 5.0})
    floor.measure(learner(), batch())
    assert floor.value is not None


def test_a_difference_beyond_rounding_is_warned_of_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    floor = RoundingFloor(torch.bfloat16)
    floor.value = 0.04
    with caplog.at_level(logging.WARNING, "consumers.grpo.rounding_floor"):
        for fresh in (0.05, 0.119, None, 0.2, 0.3, 0.05, 0.2):
            floor.compare({"logprob_diff_fresh_mean": fresh})
    assert len(caplog.messages) == 2
    assert "differ by 0.2 per token (logprob_diff_fresh_mean), 5.0 times what rounding alone" in caplog.messages[0]


def config(folder: Path, dtype: str = "auto", settings: dict[str, Any] | None = None) -> Config:
    (folder / "config.json").write_text(json.dumps(settings or {}))
    values = {
        "run": "r", "directory": str(folder), "redis": {"url": "redis://127.0.0.1:1"},
        "model": {"path": str(folder), "dtype": dtype}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
    }  # fmt: skip
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("dtype", "settings", "wanted"),
    [
        ("bfloat16", {"dtype": "float32"}, torch.bfloat16),
        ("half", {}, torch.float16),
        ("auto", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ("auto", {"dtype": "float32"}, torch.float16),
        ("auto", {"dtype": "float32", "model_type": "gemma3"}, torch.bfloat16),
        ("auto", {}, torch.float16),
    ],
)
def test_the_type_of_the_engines_is_the_one_that_sglang_takes(
    tmp_path: Path, dtype: str, settings: dict[str, Any], wanted: torch.dtype
) -> None:
    assert engine_dtype(config(tmp_path, dtype, settings)) is wanted


def test_each_step_is_recorded_beside_the_floor(tmp_path: Path) -> None:
    settings = config(tmp_path, "bfloat16")
    loop = TrainingLoop(settings, cast(Trainer, Source(settings)), learner())
    for n in (1, 2):
        loop.train(batch(n))
    rows = [json.loads(line) for line in (tmp_path / "r" / "steps.jsonl").read_text().splitlines()]
    first, second = (row["logprob_diff_floor"] for row in rows)
    assert 1e-3 < first < 1.0
    assert first == second
