"""Which runs there are under a folder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from penstock.console.cli.command import complete_runs
from penstock.console.cli.target import newest_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that was launched, one that was started by hand later, one moved aside, and another user's."""
    marks = (
        "launched/run.json",
        "launched/redis.json",
        "by-hand/redis.json",
        "old.prev/redis.json",
        "theirs/redis.json",
    )
    for time_s, mark in enumerate(marks):
        path = tmp_path / mark
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (time_s, time_s))
    stat = Path.stat

    def refused(self: Path, **how: Any) -> os.stat_result:
        if self.parent.name == "theirs":
            raise PermissionError(13, "Permission denied")
        return stat(self, **how)

    monkeypatch.setattr(Path, "stat", refused)
    return tmp_path


def test_the_shell_completes_runs_past_one_that_cannot_be_read(runs: Path) -> None:
    context = cast("typer.Context", SimpleNamespace(params={"directory": str(runs)}))
    assert complete_runs(context, "") == ["by-hand", "launched"]
    assert complete_runs(context, "l") == ["launched"]


def test_the_newest_run_is_one_that_can_be_read(runs: Path) -> None:
    assert newest_run(runs) == "by-hand"
