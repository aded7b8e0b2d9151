"""T18: what a loop reads of finished evaluations, and when one may end training."""

import logging
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.errors import ConfigError, OwnershipLost, PenstockError, WaitTimeout
from penstock.records.causes import EvaluationPending
from tests.unit.penstock.history.test_eval_rows import row, rows_of


class Asked:
    """A clock at version 7; remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    def read(self) -> int:
        return 7

    def ask_evaluation(self, version: int, end: str) -> None:
        self.asked.append((version, end))


@pytest.fixture
def evaluations(tmp_path: Path) -> Evaluations:
    return Evaluations(make_config(tmp_path), Asked(), is_read=True)


def make_config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": "r",
            "redis": {"url": "redis://127.0.0.1:1"},
            "model": {"path": str(folder)},
            "data": {
                "train": [{"name": "d", "path": "d.jsonl"}],
                "eval": [{"name": name, "path": f"{name}.jsonl"} for name in ("held", "other")],
            },
        }
    )


def test_T18_only_what_the_asked_version_drew_ends_training(
    evaluations: Evaluations, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations.add(rows_of(row("held/1/0", {1: 94, 2: 6}), row("other/1/0", {1: 100})))
    with caplog.at_level(logging.WARNING):
        assert not evaluations.has_reached(0.9)
        assert not evaluations.has_reached(0.9)
    (said,) = caplog.messages
    assert "version 1 reached accuracy 1.000 but does not end training: it generated 94 %" in said
    assert "data.eval_pinned" in said
    evaluations.add(rows_of(row("held/2/0", {2: 95, 3: 5}), row("other/2/0", {2: 10}, reward=0.0)))
    assert not evaluations.has_reached(0.9)
    assert evaluations.has_reached(0.5)


def test_T18_a_version_without_a_result_on_every_dataset_does_not_end_training(evaluations: Evaluations) -> None:
    rows = rows_of(*(row(f"held/1/{prompt}", {1: 10}) for prompt in range(20)))
    evaluations.add(rows)
    assert not evaluations.has_reached(0.9)
    evaluations.add(rows_of(row("other/1/0", {1: 10})))
    assert evaluations.has_reached(0.9)


def test_an_evaluation_most_of_whose_prompts_are_missing_ends_nothing(
    evaluations: Evaluations, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations.add(rows_of(row("held/1/0", {1: 10}), row("other/1/0", {1: 10}), asked=20))
    with caplog.at_level(logging.WARNING):
        assert not evaluations.has_reached(0.5)
    assert (
        "version 1 reached accuracy 1.000 but does not end training: 10 % of its prompts were answered" in caplog.text
    )
    evaluations.add(rows_of(row("held/2/0", {2: 10}), row("other/2/0", {2: 10}), asked=2))
    assert evaluations.has_reached(0.5)


def test_a_row_that_does_not_tell_its_versions_ends_nothing(evaluations: Evaluations) -> None:
    evaluations.add([{"dataset": name, "version": 1, "accuracy": 1.0} for name in ("held", "other")])
    assert not evaluations.has_reached(0.5)


def test_the_last_evaluation_is_waited_for_until_every_dataset_has_its_row_its_limit_or_a_stop(
    evaluations: Evaluations,
) -> None:
    evaluations.add(rows_of(row("held/1/0", {1: 10})))
    with pytest.raises(WaitTimeout, match=r"did not finish within 0\.01 s \(1 of 2"):
        evaluations.wait(1, 0.01)
    assert evaluations.wait(1, None, stopped=lambda: True) is None
    evaluations.add(rows_of(row("other/1/0", {1: 10}, reward=0.0)))
    found = evaluations.wait(1, None)
    assert found is not None
    assert found.accuracy == {"held": 1.0, "other": 0.0}


def test_an_evaluation_that_is_over_without_an_answer_to_a_dataset_is_told_of_and_not_waited_for(
    evaluations: Evaluations, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations.add(rows_of(row("held/1/0", {1: 10})))
    evaluations.end(1)
    with pytest.raises(PenstockError, match="Version 1 will get no accuracy on other"):
        evaluations.wait(1, None)
    assert "Version 1 will get no accuracy on other" in caplog.text
    with pytest.raises(WaitTimeout, match="0 of 2 datasets did, missing held, other") as told:
        evaluations.wait(2, 0.01)
    assert (told.value.count, told.value.cause) == (0, EvaluationPending(2, ("held", "other")))


def test_iterating_yields_each_finished_evaluation_once_and_none_of_an_earlier_start(evaluations: Evaluations) -> None:
    evaluations.add(rows_of(row("held/1/0", {1: 10})), is_new=False)
    evaluations.add(rows_of(row("held/2/0", {2: 10}), row("other/2/0", {2: 10}, reward=0.0)))
    evaluations.add(rows_of(row("held/4/0", {4: 10})))
    assert [(one.version, one.accuracy) for one in evaluations] == [
        (2, {"held": 1.0, "other": 0.0}),
        (4, {"held": 1.0}),
    ]
    assert list(evaluations) == []


def test_I8_a_loop_hears_that_evaluations_are_no_longer_read(evaluations: Evaluations) -> None:
    evaluations.fail(OwnershipLost("another trainer has it"))
    with pytest.raises(PenstockError, match="Reading evaluations failed: another trainer has it"):
        list(evaluations)
    with pytest.raises(PenstockError, match="another trainer has it"):
        evaluations.evaluate(3)


def test_the_newest_version_is_evaluated_if_none_is_named(tmp_path: Path) -> None:
    clock = Asked()
    evaluations = Evaluations(make_config(tmp_path), clock, is_read=True)
    evaluations.add(rows_of(row("held/7/0", {7: 10}), row("other/7/0", {7: 10})))
    found = evaluations.evaluate(end="done")
    assert found is not None
    assert found.version == 7
    assert clock.asked == [(7, "done")]


def test_a_process_that_reads_no_evaluations_sees_none_and_is_refused_one(tmp_path: Path) -> None:
    assert list(Evaluations()) == []
    with pytest.raises(ConfigError, match=r"data\.eval is empty"):
        Evaluations().evaluate()
    beside = Evaluations(make_config(tmp_path), Asked(), is_read=False)
    with pytest.raises(ConfigError, match="Only rank 0 of the publishing trainer reads evaluations"):
        beside.evaluate()
