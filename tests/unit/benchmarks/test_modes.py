"""Figures of runs of which some steps had no loss token, so that their means are null."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import modes, on_expiry


def write(folder: Path, staleness: list[float | None]) -> Path:
    folder.mkdir()
    times = {"wait_s": 1.0, "step_s": 2.0, "publish_s": 1.0, "generated_tokens": 100, "samples": 10}
    steps = [
        {"step": n, "time_s": 4.0 * n, "staleness_mean": value, **times} for n, value in enumerate(staleness, start=1)
    ]
    evaluation = {"version": len(steps) + 1, "accuracy": 0.5}
    for name, rows in (("steps.jsonl", steps), ("eval.jsonl", [evaluation])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("staleness", "mean"), [([1.0, None, 2.0], 1.5), ([None, None], None)])
def test_the_mean_of_staleness_leaves_out_steps_without_any(
    tmp_path: Path, staleness: list[float | None], mean: float | None
) -> None:
    assert modes.read(write(tmp_path / "a", staleness), target=2.0).staleness_mean == mean


def test_reports_leave_out_runs_without_staleness(tmp_path: Path) -> None:
    runs = [modes.read(write(tmp_path / str(n), [value]), target=2.0) for n, value in enumerate((None, 3.0))]
    figures: list[dict[str, Any]] = [dict.fromkeys(on_expiry.COLUMNS, 1.0) | {"staleness_mean": value}
                                     for value in (None, 3.0)]  # fmt: skip

    by_mode = modes.report({"some": runs, "none": runs[:1]}, 2.0, "0").rows
    by_choice = on_expiry.report({"wait": figures, "drop": figures[:1]}, bound=1, steps=1, sglang="0").rows

    assert [row["staleness_mean"] for row in by_mode] == [3.0, None]
    assert [row["staleness_mean"] for row in by_choice] == [3.0, None]
