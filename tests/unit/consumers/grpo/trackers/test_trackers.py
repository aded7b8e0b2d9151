"""What a run shows at trackers: its figures by their names, configuration without secrets, and what it came to."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.config import Config
from penstock.config.trainer import TRACKERS
from penstock.consumers.grpo.loop import TrainingLoop
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.trackers import names, trackers
from penstock.consumers.grpo.trackers.kinds import settings_of
from penstock.consumers.grpo.trackers.trackers import Trackers
from penstock.consumers.metrics.steps import answer_figures
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from tests.batch_factory import make_batch, make_samples, tiny_model
from tests.unit.consumers.grpo.sources import Source
from tests.unit.consumers.grpo.trackers.test_reporter import Recording


def config(folder: Path, *report_to: str, **sections: Any) -> Config:
    values = {
        "run": "r",
        "directory": str(folder),
        "redis": {"url": "redis://:hush-hush@127.0.0.1:1"},
        "model": {"path": str(folder)},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "trainer": {"report_to": list(report_to)},
    }
    return Config.model_validate(values | sections)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    """Trackers that were opened, by name; none of their libraries is needed."""
    found: dict[str, Recording] = {}

    def make(name: str, *_: object) -> Recording:
        found[name] = Recording()
        return found[name]

    monkeypatch.setattr(trackers, "KINDS", {name: partial(make, name) for name in TRACKERS})
    monkeypatch.setattr(trackers, "check_installed", lambda *_: None)
    return found


def test_every_tracker_is_told_and_no_secret_of_the_configuration(tmp_path: Path, opened: dict[str, Recording]) -> None:
    with Trackers(config(tmp_path, *TRACKERS)) as shown:
        shown.metrics(1, {"train/loss": 0.5, "text": "no number", "nan": float("nan"), "flag": True})
        shown.evaluation(3, {"eval/d": 0.25})
        shown.summary({"steps": 1, "audit": "ok", "nested": {}})
    assert opened.keys() == set(TRACKERS)
    for tracker in opened.values():
        assert tracker.told == [
            (1, {"train/loss": 0.5, "flag": 1.0}),
            ("evaluation", 3, {"eval/d": 0.25}),
            ("summary", {"steps": 1, "audit": "ok"}),
            ("close",),
        ]
    settings = settings_of(config(tmp_path, *TRACKERS))
    assert settings["trainer"]["report_to"] == list(TRACKERS)
    assert "hush" not in json.dumps(settings)


def test_without_trackers_nothing_is_opened(tmp_path: Path, opened: dict[str, Recording]) -> None:
    with Trackers(config(tmp_path)) as shown:
        shown.metrics(1, {"x": 1})
    assert not opened
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^trainer\.report_to {name} needs {name}, .*'penstock\[{name}\]'\.$"):
        Trackers(config(tmp_path, name))


def test_a_tracker_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no tracker 'comet': choose tensorboard, wandb, trackio"):
        Trackers(config(tmp_path), ["comet"])


def test_figures_of_a_batch_have_slimes_names() -> None:
    samples = make_samples({5: tiny_model(2)}, groups=3, n=4)
    for sample in samples:
        sample.reward = 1.0 if sample.job.id.endswith("0") else float(sample.k)
    batch = make_batch(samples)
    lengths = sorted(row.num_generated for row in batch.all_rows)
    figures = answer_figures(batch.manifest)
    assert figures["rollout/response_len/max"] == lengths[-1]
    assert figures["rollout/response_len/min"] == lengths[0]
    assert figures["rollout/response_len/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert figures["rollout/truncated_ratio"] == 0
    assert {key: value for key, value in figures.items() if "zero_std" in key} == {"rollout/zero_std/count_1.0": 1}


def test_a_user_adds_the_figures_of_a_batch_to_their_own(tmp_path: Path, opened: dict[str, Recording]) -> None:
    batch = make_batch(make_samples({5: tiny_model(2)}))
    with Trackers(config(tmp_path), ["trackio"]) as shown:
        shown.metrics(7, {"train/loss": 0.5, "rollout/raw_reward": 9.0}, batch=batch)
    [(step, values), _] = opened["trackio"].told
    assert step == 7
    assert (values["train/loss"], values["rollout/raw_reward"]) == (0.5, 9.0)
    assert values["rollout/samples"] == len(batch.all_rows)
    assert "rollout/response_len/mean" in values


def test_the_reference_trainer_shows_what_it_writes_down(tmp_path: Path, opened: dict[str, Recording]) -> None:
    model = tiny_model(2)
    made = config(tmp_path, "wandb", trainer={"report_to": ["wandb"], "lr": 0.01})
    learner = GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), made.trainer)
    source = Source(made)
    batch = make_batch(make_samples({5: tiny_model(2)}), n=1)
    TrainingLoop(made, cast(Trainer, source), learner).train(batch)
    source.steps.close(finished=False)
    [(step, values), _] = opened["wandb"].told
    (row,) = (json.loads(line) for line in (tmp_path / "r" / "steps.jsonl").read_text().splitlines())
    assert step == row["step"] == 1
    assert values["train/loss"] == row["loss"]
    assert values["rollout/tokens"] == row["tokens"] == sum(one.length for one in batch.all_rows), "prompts included"
    assert values["rollout/loss_tokens"] == row["loss_tokens"] == batch.manifest.num_loss_tokens
    assert values["perf/train_time"] == row["step_s"]
    assert values["rollout/raw_reward"] == row["reward_mean"]
    assert values["rollout/response_len/mean"] == row["rollout/response_len/mean"]
    assert not {"step", "train/step", "train/time_s"} & values.keys()


def test_only_rank_0_reports(tmp_path: Path, opened: dict[str, Recording]) -> None:
    model = tiny_model(2)
    made = config(tmp_path, "wandb")
    learner = GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), made.trainer)
    source = Source(made, rank=1)
    TrainingLoop(made, cast(Trainer, source), learner, rank=1, size=2).train(
        make_batch(make_samples({5: tiny_model(2)}), n=1)
    )
    source.steps.close()
    assert not opened


def test_an_evaluation_is_named_by_its_dataset() -> None:
    row = {"dataset": "held", "version": 3, "accuracy": 0.5, "truncated_ratio": 0.25, "num": 7, "pass@4": 0.75}
    assert names.of_evaluation(row) == {"eval/held": 0.5, "eval/held-truncated_ratio": 0.25, "eval/held-pass@4": 0.75}


def test_an_evaluation_stands_at_the_mean_version_of_its_tokens_at_trackers(
    tmp_path: Path, opened: dict[str, Recording]
) -> None:
    row = {"dataset": "held", "version": 3, "accuracy": 0.5, "mean_version": 5.25, "oldest": 3, "newest": 7}
    row |= {"asked_share": 0.125}
    with Trackers(config(tmp_path, "tensorboard")) as shown:
        shown.evaluation_rows([row])
    (_, place, values), _ = opened["tensorboard"].told
    assert place == 5.25
    assert values == {
        "eval/held": 0.5, "eval/held-mean_version": 5.25, "eval/held-oldest": 3.0, "eval/held-newest": 7.0,
        "eval/held-asked_share": 0.125, "eval/requested_version": 3.0,
    }  # fmt: skip


def test_an_evaluation_of_several_datasets_is_one_entry_and_told_once_over_starts(
    tmp_path: Path, opened: dict[str, Recording]
) -> None:
    rows = [{"dataset": name, "version": n, "accuracy": 0.5} for n in (1, 4) for name in ("held", "other")]
    with Trackers(config(tmp_path, "tensorboard")) as shown:
        shown.evaluation_rows(rows[:2])
    with Trackers(config(tmp_path, "tensorboard")) as shown:
        shown.evaluation_rows(rows)
    assert opened["tensorboard"].told == [
        ("evaluation", 4, {"eval/held": 0.5, "eval/other": 0.5}),
        ("close",),
    ]
