"""Master weights are float32 whatever type the engines use, and a step that changes too few of them is warned of."""

import copy
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.config import Config, TrainerConfig
from penstock.consumers.grpo import process
from penstock.consumers.grpo.loop import TrainingLoop, learner_of
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.weight_changes import CHECKED_STEPS, WeightChanges
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.sources import State, float32_names
from tests.batch_factory import gradient, make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo.sources import Source

CPU = torch.device("cpu")


def config(folder: Path, dtype: str = "auto", **trainer: Any) -> Config:
    tiny_model(2).save_pretrained(folder / "model")
    values = {
        "run": "r", "directory": str(folder), "redis": {"url": "redis://127.0.0.1:1"},
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "trainer": {"lr": 5e-6, "warmup_steps": 0, **trainer},
    }  # fmt: skip
    return Config.model_validate(values)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).clone()


def batch() -> Any:
    return make_batch(make_samples({5: tiny_model(1)}), train_version=5)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "half", "float32"])
def test_the_trainer_holds_float32_weights_whatever_type_the_engine_uses(tmp_path: Path, dtype: str) -> None:
    learner = learner_of(config(tmp_path, dtype), 1)
    assert {one.dtype for one in learner.model.parameters()} == {torch.float32}

    before = flat(learner.model)
    learner.step(batch())

    assert float((flat(learner.model) != before).double().mean()) > 0.99


class Published(Source):
    """A source of batches that keeps what was published."""

    tensors: dict[str, torch.Tensor]

    def publish(self, weights: Any, *, step: int) -> int:
        source = State(weights) if isinstance(weights, torch.nn.Module) else weights
        self.tensors = dict(source.tensors({}))
        return super().publish(weights, step=step)


@pytest.mark.parametrize(
    ("dtype", "published"), [("bfloat16", torch.bfloat16), ("half", torch.float16), ("auto", torch.float32)]
)
def test_weights_are_published_in_the_type_of_the_engines(tmp_path: Path, dtype: str, published: torch.dtype) -> None:
    settings = config(tmp_path, dtype)
    source, learner = Published(settings), learner_of(settings, 1)
    TrainingLoop(settings, cast(Trainer, source), learner).train(batch())

    assert {one.dtype for one in source.tensors.values()} == {published}
    wanted = dict(State(learner.model).tensors({}))
    assert source.tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].to(published)) for name, tensor in source.tensors.items())


def test_tensors_that_transformers_keeps_in_float32_stay_float32() -> None:
    model = tiny_model()
    assert float32_names(model, "bfloat16") is None
    model._keep_in_fp32_modules_strict = {"e_score_correction_bias"}
    model._keep_in_fp32_modules = {"wo"}
    strict, all_ = float32_names(model, "bfloat16"), float32_names(model, "float16")
    assert strict is not None
    assert all_ is not None
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert [bool(strict.search(one)) for one in (name, "a.wo.weight", "a.wow.weight")] == [True, False, False]
    assert [bool(all_.search(one)) for one in (name, "a.wo.weight", "a.wow.weight")] == [True, True, False]


def test_auto_computes_in_bfloat16_on_a_gpu_and_in_float32_on_a_cpu() -> None:
    gpu = torch.device("cuda", 0)
    found = {name: (process.compute_dtype(name, gpu), process.compute_dtype(name, CPU)) for name in
             ("auto", "bfloat16", "float32")}  # fmt: skip
    assert found == {
        "auto": (torch.bfloat16, torch.float32),
        "bfloat16": (torch.bfloat16, torch.bfloat16),
        "float32": (torch.float32, torch.float32),
    }


def test_tf32_is_enabled_on_a_gpu_unless_float32_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for name, device in (("auto", "cpu"), ("float32", "cuda:0"), ("bfloat16", "cpu")):
        process.enable_tf32(name, torch.device(device))
    assert (asked, torch.backends.cudnn.allow_tf32) == ([], False)
    process.enable_tf32("auto", torch.device("cuda"))
    assert (asked, torch.backends.cudnn.allow_tf32) == (["high"], True)


def learner(dtype: str = "auto", weights: torch.dtype = torch.float32, lr: float = 5e-6, **trainer: Any) -> GRPO:
    model = tiny_model(2).to(weights)
    settings = TrainerConfig.model_validate({"lr": lr, "warmup_steps": 0, "dtype": dtype, **trainer})
    return GRPO(model, torch.optim.AdamW(model.parameters(), lr=lr), settings)


def test_bfloat16_computes_with_autocast_around_float32_weights() -> None:
    seen: list[torch.dtype] = []
    found: dict[str, GRPO] = {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = learner(dtype)
        found[dtype].model.lm_head.register_forward_hook(lambda *of: seen.append(of[-1].dtype))
        found[dtype].step(make_batch(make_samples({5: tiny_model(2)}), train_version=5))
    assert set(seen) == {torch.float32, torch.bfloat16}
    exact, rounded = (gradient(found[dtype].model) for dtype in ("float32", "bfloat16"))
    assert {one.grad.dtype for one in found["bfloat16"].model.parameters() if one.grad is not None} == {torch.float32}
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.1


def test_auto_on_a_cpu_computes_what_float32_does() -> None:
    exact, auto = learner("float32"), learner("auto")
    assert exact.step(batch()) == auto.step(batch())
    assert torch.equal(flat(exact.model), flat(auto.model))


def test_steps_that_are_lost_in_rounding_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    coarse = learner(weights=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "penstock.consumers.grpo.weight_changes"):
        for _ in range(CHECKED_STEPS + 2):
            coarse.step(batch())
    assert len(caplog.records) == CHECKED_STEPS
    assert "optimizer step 1 of this process changed" in caplog.messages[0]
    assert "(bfloat16)" in caplog.messages[0]


@pytest.mark.parametrize("lr", [5e-6, 0.0])
def test_float32_weights_and_a_learning_rate_of_0_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, lr: float
) -> None:
    trainer = learner(lr=lr)
    with caplog.at_level(logging.WARNING, "penstock.consumers.grpo.weight_changes"):
        trainer.step(batch())
    assert not caplog.records


def test_a_step_with_a_learning_rate_of_0_is_not_one_of_those_that_are_checked() -> None:
    weights = [torch.zeros(4)]
    changes = WeightChanges(weights)
    for lr in [0.0] * 3 + [1e-6] * (CHECKED_STEPS + 1):
        changes.before_step(lr)
        weights[0][:3] += 1
        found = changes.after_step()
        assert found == (None if not lr or changes.steps > CHECKED_STEPS else found)
    assert changes.steps == CHECKED_STEPS


@pytest.mark.parametrize("size", [1, 3, 7, 10, 1000])
def test_the_sample_is_spread_over_all_parameters(size: int) -> None:
    weights = [torch.arange(4.0).reshape(2, 2), torch.empty(0), torch.arange(4.0, 10.0).reshape(3, 2).T]
    changes = WeightChanges(weights, size)
    flat_weights = torch.cat([one.reshape(-1) for one in weights])
    count = min(size, 10)
    assert torch.equal(changes._sample(), flat_weights[torch.arange(count) * 10 // count])


def test_the_share_is_that_of_the_changed_weights() -> None:
    weights = [torch.ones(30), torch.ones(10)]
    changes = WeightChanges(weights, 40)
    changes.before_step(1e-3)
    weights[0] += 1
    assert changes.after_step() == pytest.approx(0.75)
    assert copy.deepcopy(changes.steps) == 1
