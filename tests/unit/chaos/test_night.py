"""A night goes on where it was stopped, keeps what each run came to, and adds it up."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import night
from tests.chaos.night import Ledger, Run, plan, report

ROW: dict[str, Any] = {
    "workload": "async", "seed": 1, "redis": "7.0.15", "wall_s": 90.0, "violations": {},
    "faults": {"kill:worker": 3}, "counted": {"kill:worker": 2}, "recovery_s": {"kill:worker": [1.0, 3.0]},
}  # fmt: skip
RUN = Run("async", 1, "7.0.15", Path("redis-server"))


def test_runs_that_stand_in_the_ledger_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night, "version_of", lambda binary: binary.name)
    ledger = Ledger(tmp_path)
    ledger.append(RUN, ROW, b"history")
    made = {(row["workload"], row["seed"], row["redis"]) for row in ledger.rows()}

    runs = list(itertools.islice(plan(["async", "sync"], [Path("6.2.14"), Path("7.0.15")], 1, made), 4))

    assert [(one.workload, one.seed, one.redis) for one in runs] == [
        ("sync", 1, "6.2.14"), ("async", 2, "6.2.14"), ("sync", 2, "7.0.15"), ("async", 3, "7.0.15"),
    ]  # fmt: skip


def test_a_line_that_a_kill_tore_is_a_run_to_be_made_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(RUN, ROW, b"history")
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(json.dumps(ROW).encode()[:20])

    again = Ledger(tmp_path)
    again.append(RUN, ROW, b"history")
    assert again.rows() == [ROW, ROW]


def test_a_large_history_is_kept_where_something_was_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    large = bytes(night.KEPT_BYTES + 1)

    ledger.append(RUN, ROW, large)
    assert list((tmp_path / "histories").iterdir()) == []
    ledger.append(RUN, ROW | {"violations": {"lost": 1}}, large)
    assert [path.name for path in (tmp_path / "histories").iterdir()] == ["async-1-redis7.0.15.tar.xz"]


def test_a_report_adds_up_faults_and_names_what_was_found() -> None:
    found = ROW | {"seed": 2, "violations": {"lost": 1}, "recovery_s": {"kill:worker": [5.0]}}

    said = report([ROW, found])

    assert "2 runs, 0.1 hours of runs, 4 faults that count." in said
    assert "| `kill:worker` | 6 | 4 | 3.00 | 4.96 |" in said
    assert "- async seed 2, Redis 7.0.15: {'lost': 1}" in said
