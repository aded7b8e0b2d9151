"""The record of a step: one row per committed batch, however the loop around the trainer client is written."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config
from penstock.consumers.grpo.rows import read_rows
from penstock.consumers.grpo.trackers import trackers
from penstock.consumers.grpo.trackers.trackers import Trackers
from penstock.consumers.metrics import steps
from penstock.consumers.metrics.recorder import LatestRecord
from penstock.consumers.metrics.steps import StepRecorder, steps_file
from penstock.consumers.metrics.tally import Tally
from penstock.records.codec import pack, unpack
from penstock.records.manifest import Manifest, Row
from tests.batch_factory import make_manifest
from tests.unit.consumers.grpo.trackers.test_reporter import Recording


class Shown(LatestRecord):
    """Keeps what would be written to Redis."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def show(self, record: Any) -> None:
        self.record = dict(record)

    def close(self) -> None: ...


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return 1000.0 + self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(steps, "time", made)
    return made


def config(folder: Path, **trainer: Any) -> Config:
    values = {
        "run": "r",
        "directory": str(folder),
        "model": {"path": str(folder)},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "trainer": trainer,
    }
    return Config.model_validate(values)


def batch(n: int, **changes: Any) -> Manifest:
    rows = [
        Row(f"d/0/{job}", k, "t", "s", 0, 0, 11, 1, 10, 10, 4, 5, 5, float(k), "completed")
        for job in range(2)
        for k in range(2)
    ]
    return make_manifest(rows, n=n, **{"train_version": n} | changes)


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def made(tmp_path: Path) -> Config:
    return config(tmp_path)


@pytest.fixture
def recorder(made: Config, tally: Tally, shown: Shown) -> StepRecorder:
    return StepRecorder(made, "actor", tally, file=steps_file(made, "actor", is_main=True), latest=shown)


def lines(config: Config, name: str = "steps.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / name).read_text().splitlines()]


def test_a_committed_batch_has_one_row_with_its_figures_and_times(
    made: Config, tally: Tally, recorder: StepRecorder, clock: Clock
) -> None:
    tally.waits["batch"] += 3.0
    recorder.hand_out(1)
    clock.now_s += 5.0
    recorder.commit(batch(1))
    with recorder.publishing():
        clock.now_s += 2.0
    recorder.finish()
    (row,) = lines(made)
    assert (row["step"], row["batch"], row["version"], row["trainer"]) == (1, 1, 1, "actor")
    assert (row["reward_mean"], row["staleness_max"], row["staleness_mean"]) == (0.5, 2, 1.0)
    assert (row["samples"], row["tokens"], row["generated_tokens"], row["loss_tokens"]) == (4, 44, 40, 40)
    assert (row["wait_s"], row["step_s"], row["publish_s"], row["time_s"]) == (3.0, 5.0, 2.0, 1107.0)
    assert row["rollout/response_len/mean"] == 10.0
    assert tally.sums["batches"] == 1


def test_a_batch_that_was_handed_out_ahead_is_not_timed_while_the_one_before_it_is_trained(
    made: Config, recorder: StepRecorder, clock: Clock
) -> None:
    recorder.hand_out(1)
    recorder.hand_out(2)
    clock.now_s += 5.0
    recorder.commit(batch(1))
    clock.now_s += 7.0
    recorder.commit(batch(2))
    recorder.finish()
    assert [row["step_s"] for row in lines(made)] == [5.0, 7.0]


def test_reports_before_and_after_the_commit_are_added_and_own_figures_keep_their_value(
    made: Config, recorder: StepRecorder, shown: Shown, tally: Tally
) -> None:
    recorder.hand_out(1)
    recorder.report({"loss": torch.tensor(0.5), "step": 70, "why": "so"})
    recorder.commit(batch(1))
    recorder.report({"grad_norm": float("nan"), "reward_mean": 9.0, "lr": 1e-6})
    recorder.finish()
    (row,) = lines(made)
    assert (row["loss"], row["lr"], row["why"], row["grad_norm"]) == (0.5, 1e-6, "so", None)
    assert (row["step"], row["reward_mean"]) == (1, 0.5)
    assert (shown.record["loss"], shown.record["step"], shown.record["reward_mean"]) == (0.5, 1, 0.5)
    assert tally.reported["lr"] == 1e-6
    recorder.commit(batch(2))
    recorder.finish()
    assert "loss" not in lines(made)[1], "figures are of one step"


def test_a_publication_after_the_next_batch_was_handed_out_is_of_the_batch_committed_last(
    made: Config, recorder: StepRecorder, clock: Clock
) -> None:
    """Its weights are of that batch. Figures that are reported by then are of the batch that is trained now."""
    recorder.hand_out(1)
    recorder.commit(batch(1))
    recorder.report({"loss": 1.0})
    recorder.hand_out(2)
    recorder.report({"loss": 2.0})
    with recorder.publishing():
        clock.now_s += 2.0
    clock.now_s += 5.0
    recorder.commit(batch(2))
    recorder.hand_out(3)
    recorder.close()
    rows = read_rows(made.run_dir).steps
    assert [(row["step"], row["loss"], row["publish_s"], row["step_s"]) for row in rows] == [
        (1, 1.0, 2.0, 0.0),
        (2, 2.0, 0.0, 5.0),
    ]


def test_a_trainer_that_reports_before_its_first_commit_is_shown(recorder: StepRecorder, shown: Shown) -> None:
    recorder.report({"loss": 2.0})
    assert (shown.record["name"], shown.record["rank"], shown.record["loss"]) == ("actor", 0, 2.0)


def test_a_checkpoint_finds_the_row_of_its_step_and_later_figures_replace_it(
    made: Config, recorder: StepRecorder
) -> None:
    recorder.commit(batch(1))
    recorder.write()
    assert [row["step"] for row in lines(made)] == [1]
    recorder.report({"loss": 0.25})
    recorder.finish()
    assert [(row["step"], row.get("loss")) for row in read_rows(made.run_dir).steps] == [(1, 0.25)]
    recorder.finish()
    recorder.write()
    assert len(lines(made)) == 2, "what did not change is not written again"


def test_a_commit_that_is_repeated_adds_nothing_and_one_without_a_publication_has_its_row(
    made: Config, tally: Tally, recorder: StepRecorder
) -> None:
    recorder.commit(batch(1))
    recorder.commit(batch(1))
    recorder.commit(batch(2))
    recorder.close()
    assert [(row["step"], row["publish_s"]) for row in lines(made)] == [(1, 0.0), (2, 0.0)]
    assert tally.sums["batches"] == 2


def test_T15_steps_that_come_again_after_a_rewind_replace_the_rows_of_the_weights_that_are_gone(
    made: Config, recorder: StepRecorder
) -> None:
    for n in (1, 2, 3):
        recorder.commit(batch(n))
    recorder.report({"loss": 1.0})
    recorder.rewind(1)
    recorder.commit(batch(2, train_version=8))
    recorder.finish()
    assert [(row["step"], row["version"]) for row in read_rows(made.run_dir).steps] == [(1, 1), (2, 8)]


def test_a_trainer_beside_the_runs_own_has_a_file_of_its_own(made: Config, tally: Tally) -> None:
    judge = StepRecorder(made, "judge", tally, file=steps_file(made, "judge", is_main=False), tracks=False)
    judge.commit(batch(1))
    judge.close()
    assert [row["trainer"] for row in lines(made, "steps-judge.jsonl")] == ["judge"]
    assert not (made.run_dir / "steps.jsonl").exists()


def test_a_rank_without_a_file_records_nothing(made: Config, tally: Tally) -> None:
    rank = StepRecorder(made, "actor", tally, file=None)
    rank.hand_out(1)
    rank.commit(batch(1))
    rank.report({"loss": 1.0})
    with rank.publishing():
        pass
    rank.close()
    assert not made.run_dir.exists()
    assert not tally.sums


def test_rows_that_find_no_room_are_kept_and_written_with_a_later_one(
    made: Config, recorder: StepRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append, full = steps.append, [True]

    def maybe(path: Path, data: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, data)

    monkeypatch.setattr(steps, "append", maybe)
    recorder.commit(batch(1))
    recorder.commit(batch(2))
    recorder.write()
    assert caplog.text.count("No space left on device") == 1
    full.clear()
    recorder.close()
    assert [row["step"] for row in lines(made)] == [1, 2]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    """Trackers that were opened, by name."""
    found: dict[str, Recording] = {}

    def make(*_: object) -> Recording:
        found["wandb"] = Recording()
        return found["wandb"]

    monkeypatch.setattr(trackers, "KINDS", {"wandb": make})
    monkeypatch.setattr(trackers, "check_installed", lambda *_: None)
    return found


def tracked(folder: Path) -> StepRecorder:
    made = config(folder, report_to=["wandb"])
    return StepRecorder(made, "actor", Tally(), file=steps_file(made, "actor", is_main=True))


def test_trackers_are_told_every_step_with_what_was_reported_and_what_the_run_came_to(
    tmp_path: Path, opened: dict[str, Recording]
) -> None:
    recorder = tracked(tmp_path)
    recorder.commit(batch(1))
    recorder.report({"loss": 0.5, "eval/mine": 0.75})
    recorder.evaluated([{"dataset": "held", "version": 1, "accuracy": 0.25}])
    recorder.close()
    evaluation, (step, values), (kind, summary), _ = opened["wandb"].told
    assert evaluation == ("evaluation", 1, {"eval/held": 0.25})
    assert (step, values["train/loss"], values["eval/mine"], values["rollout/raw_reward"]) == (1, 0.5, 0.75, 0.5)
    assert (kind, summary["steps"], summary["samples"]) == ("summary", 1, 4)


def test_trackers_are_told_each_step_once_whether_it_is_published_before_or_after_the_next_batch(
    tmp_path: Path, opened: dict[str, Recording]
) -> None:
    recorder = tracked(tmp_path)
    for n, is_published_late in ((1, True), (2, False), (3, True)):
        recorder.commit(batch(n))
        if is_published_late:
            recorder.hand_out(n + 1)
        with recorder.publishing():
            pass
        if not is_published_late:
            recorder.hand_out(n + 1)
    recorder.close(finished=False)
    assert [entry[0] for entry in opened["wandb"].told] == [1, 2, 3, "close"]


def test_a_trainer_that_failed_tells_trackers_no_summary(tmp_path: Path, opened: dict[str, Recording]) -> None:
    recorder = tracked(tmp_path)
    recorder.commit(batch(1))
    recorder.close(finished=False)
    assert [entry[0] for entry in opened["wandb"].told] == [1, "close"]


def test_a_loop_with_trackers_of_its_own_is_not_reported_twice(tmp_path: Path, opened: dict[str, Recording]) -> None:
    recorder = tracked(tmp_path)
    with Trackers(config(tmp_path, report_to=["wandb"])) as own:
        recorder.commit(batch(1))
        own.metrics(1, {"train/mine": 1.0})
    recorder.close()
    assert opened["wandb"].told == [(1, {"train/mine": 1.0}), ("close",)]


def test_metrics_have_every_figure_that_the_row_has(recorder: StepRecorder, tally: Tally) -> None:
    recorder.report({"loss": 0.5, "entropy": 1.0})
    recorder.commit(batch(1))
    recorder.report({"lr": 1e-6, "entropy": None})
    assert tally.reported == {"loss": 0.5, "lr": 1e-6}


def test_metrics_hold_no_reported_figure_under_the_name_of_a_figure_of_the_row(
    recorder: StepRecorder, tally: Tally
) -> None:
    recorder.report({"loss": 0.5, "tokens": 7})
    recorder.commit(batch(1))
    assert tally.reported == {"loss": 0.5}
    recorder.report({"lr": 1e-6, "tokens": 8})
    assert tally.reported == {"loss": 0.5, "lr": 1e-6}


@pytest.mark.parametrize(
    ("value", "kept"),
    [("a\udc80b", "a\\udc80b"), (10**400, f"{10**400}"), ("x" * 2000, "x" * 1000)],
    ids=["surrogate", "integer", "long"],
)
def test_a_figure_of_any_content_is_recorded(
    made: Config, recorder: StepRecorder, shown: Shown, value: Any, kept: str
) -> None:
    recorder.commit(batch(1))
    recorder.report({"note": value})
    recorder.finish()
    assert lines(made)[0]["note"] == unpack(pack(shown.record), "record")["note"] == kept
