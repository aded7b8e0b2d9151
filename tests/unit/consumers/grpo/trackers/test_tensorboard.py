"""TensorBoard's files, read back by TensorBoard: each step stands there once, after a rewind too."""

from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.grpo.trackers.trackers import Trackers
from tests.missing import module
from tests.unit.consumers.grpo.trackers.test_reporter import PATIENCE_S
from tests.unit.consumers.grpo.trackers.test_trackers import config


@pytest.fixture(autouse=True)
def _tensorboard() -> None:
    module("tensorboard")


def life(folder: Path, steps: range, loss: float, version: int) -> None:
    """One start of a trainer."""
    with Trackers(config(folder, "tensorboard")) as shown:
        for step in steps:
            shown.metrics(step, {"train/loss": loss + step})
        shown.evaluation(version, {"eval/held": loss})
        shown.summary({"steps": steps[-1]})
        shown.close(PATIENCE_S)
    assert shown.left_out == {"tensorboard": 0}


def read(folder: Path, kind: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "r" / "tensorboard" / kind), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def test_steps_that_come_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    life(tmp_path, range(1, 6), loss=0.0, version=9)
    life(tmp_path, range(4, 7), loss=100.0, version=12)
    scalars = read(tmp_path, "steps").Scalars("train/loss")
    assert [(one.step, one.value) for one in scalars] == [(1, 1), (2, 2), (3, 3), (4, 104), (5, 105), (6, 106)]


def test_evaluations_of_all_starts_stay_at_their_versions(tmp_path: Path) -> None:
    life(tmp_path, range(1, 6), loss=0.0, version=9)
    life(tmp_path, range(4, 7), loss=100.0, version=12)
    scalars = read(tmp_path, "evaluations").Scalars("eval/held")
    assert [(one.step, one.value) for one in scalars] == [(9, 0.0), (12, 100.0)]


def test_a_rewind_within_one_process_does_the_same(tmp_path: Path) -> None:
    with Trackers(config(tmp_path, "tensorboard")) as shown:
        for step in (1, 2, 3, 2):
            shown.metrics(step, {"x": len(str(step)) + step})
    assert [one.step for one in read(tmp_path, "steps").Scalars("x")] == [1, 2]


def test_configuration_and_summary_are_texts_without_secrets(tmp_path: Path) -> None:
    life(tmp_path, range(1, 3), loss=0.0, version=1)
    found = read(tmp_path, "steps")
    (settings,) = found.Tensors("config/text_summary")
    (summary,) = found.Tensors("summary/text_summary")
    text = settings.tensor_proto.string_val[0].decode()
    assert "    run: r\n" in text
    assert "hush" not in text
    assert summary.tensor_proto.string_val[0].decode() == "    steps: 2\n"
