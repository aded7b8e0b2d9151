"""A mean over nothing is null: 0 would read as perfect agreement, or as no staleness."""

import copy
import json
from pathlib import Path

import pytest
import torch

from penstock.config import Config, TrainerConfig
from penstock.consumers.grpo.rows import of_steps, ratio, read_rows
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.trackers.names import of_row
from penstock.consumers.metrics.steps import batch_figures
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.metrics.trainer import TrainerCollector
from penstock.history.eval_rows import summarize
from tests.batch_factory import make_batch, make_samples, tiny_model

#: Figures over the loss tokens of a batch.
OVER_TOKENS = (
    "loss", "clip_frac", "clip_low_frac", "clip_high_frac", "clip_dual_frac", "ratio_clamped_frac",
    "weight_capped_frac", "entropy", "ess", "k3", "ratio_min", "ratio_p01", "ratio_p50", "ratio_p99", "ratio_max",
    "logprob_diff_mean", "logprob_diff_max", "logprob_diff_fresh_mean", "logprob_diff_fresh_max", "grad_norm",
    "grad_norm_max",
)  # fmt: skip


def learner(**config: object) -> GRPO:
    model = tiny_model(2)
    settings = TrainerConfig.model_validate({"warmup_steps": 0, **config})
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), settings)


@pytest.mark.parametrize("config", [{}, {"loss": "reinforce"}, {"correction": "decoupled", "minibatches": 3}])
def test_a_batch_without_a_fresh_token_has_no_difference_of_fresh_tokens(config: dict[str, object]) -> None:
    samples = make_samples({4: tiny_model(1), 5: tiny_model(2)})
    stale = learner(**config).step(make_batch(samples, train_version=6))
    assert (stale["logprob_diff_fresh_mean"], stale["logprob_diff_fresh_max"]) == (None, None)
    assert stale["logprob_diff_mean"] is not None
    assert stale["logprob_diff_mean"] > 0

    fresh = learner(**config).step(make_batch(samples, train_version=5))
    assert fresh["logprob_diff_fresh_mean"] == pytest.approx(0, abs=1e-5), "a real 0 stays a number"


def test_a_batch_without_a_loss_token_has_no_figure_over_tokens() -> None:
    samples = make_samples({6: tiny_model(1)})
    for sample in samples:
        sample.loss_mask = [0] * len(sample.tokens)
    batch = make_batch(samples)
    assert not batch.counts["loss_tokens"]

    figures = learner().step(batch)

    assert {name: figures[name] for name in OVER_TOKENS} == dict.fromkeys(OVER_TOKENS)
    assert (figures["tokens"], figures["skipped"]) == (0.0, 1.0)
    row = batch_figures(batch.manifest)
    assert (row["staleness_mean"], row["staleness_max"]) == (None, None)
    named = of_row({**figures, **row})
    assert not {"train/loss", "train/logprob_diff_fresh_mean", "rollout/staleness_mean"} & named.keys()


def test_a_batch_without_a_loss_token_has_no_staleness_for_prometheus() -> None:
    samples = make_samples({6: tiny_model(1)})
    names = ("penstock_trainer_staleness_mean", "penstock_trainer_staleness_max")

    def served(changed: list) -> set[str]:  # type: ignore[type-arg]
        tally = Tally()
        tally.commit(make_batch(changed).manifest)
        return {metric.name for metric in TrainerCollector(tally).collect()}

    assert set(names) <= served(samples)
    masked = copy.deepcopy(samples)
    for sample in masked:
        sample.loss_mask = [0] * len(sample.tokens)
    assert not set(names) & served(masked)


def test_an_evaluation_without_a_loss_token_has_no_share_of_the_asked_version() -> None:
    samples = make_samples({6: tiny_model(1)})
    for sample in samples:
        sample.loss_mask = [0] * len(sample.tokens)
    (row,) = summarize(make_batch(samples).manifest.samples(), asked=3)
    assert row["asked_share"] is None


def test_a_summary_takes_the_mean_over_the_steps_that_have_the_figure(tmp_path: Path) -> None:
    data = {"train": [{"path": "d.jsonl", "name": "d"}]}
    config = Config.model_validate({"run": "r", "model": {"path": "m"}, "data": data})
    rows = [{"step": 1, "loss_tokens": 8, "staleness_mean": 2.0, "staleness_max": 3}]
    rows += [{"step": 2, "loss_tokens": 0, "staleness_mean": None, "staleness_max": None}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of_steps(config, read_rows(tmp_path))
    assert (found["staleness_mean"], found["staleness_max"]) == (2.0, 3)

    (tmp_path / "steps.jsonl").unlink()
    nothing = of_steps(config, read_rows(tmp_path))
    assert {nothing[key] for key in ("staleness_mean", "staleness_max", "trainer_wait_share")} == {None}
    assert (ratio(1, 0), ratio(0, 4)) == (None, 0.0)
