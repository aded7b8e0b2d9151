"""What rounding alone makes of logprobs is measured at the start, and the metric is compared with it."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.config import Config, TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import rounding_floor
from penstock.consumers.grpo.loop import TrainingLoop
from penstock.consumers.grpo.rounding_floor import LEAST_FLOOR, RoundingFloor, engine_dtype, rounding_of
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.trainer import Trainer
from tests.batch_factory import logprobs_of, make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo.sources import Source


def learner(**changes: Any) -> GRPO:
    model = tiny_model(2)
    config = TrainerConfig.model_validate({"lr": 1e-4, "warmup_steps": 0, **changes})
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config)


def batch(n: int = 1) -> Batch:
    return make_batch(make_samples({5: tiny_model(2)}), train_version=5, n=n)


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 40}])
def test_the_floor_is_the_mean_difference_of_loss_tokens_in_both_types(tmp_path: Path, limits: dict[str, int]) -> None:
    samples = make_samples({5: tiny_model(2)})
    tiny_model(2).save_pretrained(tmp_path)
    exact, rounded, away = tiny_model(2), type(tiny_model()).from_pretrained(tmp_path, dtype=torch.bfloat16), []
    with torch.no_grad():
        for sample in samples:
            found = [logprobs_of(model, sample.tokens, 1.0).float() for model in (exact, rounded)]
            away += (found[0] - found[1]).abs()[torch.tensor(sample.generated).bool()].tolist()

    measured = rounding_of(learner(**limits), make_batch(samples, train_version=5), torch.bfloat16)

    assert measured == pytest.approx(sum(away) / len(away), rel=0.25)
    assert 1e-3 < measured < 1.0
    assert rounding_of(learner(), batch(), torch.float32) == 0.0


class Rotary(torch.nn.Module):
    """Computes in float32, whatever type its parameters have, with frequencies in a buffer as RoPE has them."""

    _keep_in_fp32_modules_strict = ("bias",)

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(16, generator=generator)) for _ in range(2))
        self.register_buffer("inv_freq", torch.rand(16, generator=generator), persistent=False)

    def forward(self, *, input_ids: torch.Tensor, use_cache: bool, **_: torch.Tensor) -> Any:
        angles = torch.arange(input_ids.shape[1])[:, None] * self.inv_freq
        logits = angles.cos() * self.weight.float() + self.bias.float()
        return SimpleNamespace(logits=logits.expand(len(input_ids), -1, -1))


@torch.no_grad()
def test_parameters_are_rounded_but_neither_buffers_nor_what_engines_keep_in_float32() -> None:
    exact = Rotary()
    by_hand = copy.deepcopy(exact)
    # Round to nearest at the 16th bit: bfloat16 is the upper half of a float32.
    bits = exact.weight.view(torch.int32).long() & 0xFFFFFFFF
    by_hand.weight.copy_(((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(torch.int32).view(torch.float32))
    assert not torch.equal(by_hand.weight, exact.weight)
    samples = make_samples({5: tiny_model(2)})
    for sample in samples:
        sample.append([2 + k % 14 for k in range(200)], version=5, logprobs=[-1.0] * 200)
    away: list[float] = []
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        both = [model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1) for model in (exact, by_hand)]
        found = [table[:-1].gather(1, ids[0, 1:, None])[:, 0] for table in both]
        away += (found[0] - found[1]).abs()[torch.tensor(sample.generated[1:]).bool()].tolist()
    config = TrainerConfig.model_validate({"lr": 1e-4})
    learner = GRPO(exact, torch.optim.SGD(exact.parameters(), lr=0.0), config)

    measured = rounding_of(learner, make_batch(samples, train_version=5), torch.bfloat16)

    assert measured == pytest.approx(sum(away) / len(away), rel=1e-4)
    assert {one.dtype for one in exact.parameters()} == {torch.float32}


def out_of_python_memory() -> None:
    raise MemoryError


def out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def out_of_cpu_memory() -> None:
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("fail", [out_of_python_memory, out_of_gpu_memory, out_of_cpu_memory])
def test_without_memory_for_the_measurement_training_continues_and_reports_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail: Callable[[], None]
) -> None:
    monkeypatch.setattr(rounding_floor, "rounding_of", lambda *_: fail())
    settings = config(tmp_path, "bfloat16")
    loop = TrainingLoop(settings, cast(Trainer, Source(settings)), learner())

    with caplog.at_level(logging.WARNING, "penstock.consumers.grpo.rounding_floor"):
        for n in (1, 2):
            loop.train(batch(n))

    rows = [json.loads(line) for line in (tmp_path / "r" / "steps.jsonl").read_text().splitlines()]
    assert [row["logprob_diff_floor"] for row in rows] == [None, None]
    assert len(caplog.messages) == 1


def test_an_error_other_than_a_lack_of_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(rounding_floor, "rounding_of", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        RoundingFloor(torch.bfloat16).measure(learner(), batch())


def test_the_floor_is_measured_once_and_never_below_what_kernels_differ_by(caplog: pytest.LogCaptureFixture) -> None:
    floor = RoundingFloor(torch.float32)
    with caplog.at_level(logging.INFO, "penstock.consumers.grpo.rounding_floor"):
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
    with caplog.at_level(logging.WARNING, "penstock.consumers.grpo.rounding_floor"):
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
