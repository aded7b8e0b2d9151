"""What a night has made stands on the disk as each run ends."""

import json
from pathlib import Path

import pytest

from tests.chaos.night import ledger
from tests.chaos.night.ledger import Ledger

ROW = {"workload": "async", "seed": 1, "violations": {}}


def test_a_line_that_a_kill_tore_is_no_run(tmp_path: Path) -> None:
    Ledger(tmp_path).append("async-1", ROW, b"history")
    with (tmp_path / "night.jsonl").open("ab") as file:
        file.write(json.dumps(ROW).encode()[:20])

    again = Ledger(tmp_path)
    again.append("async-2", ROW, b"history")

    assert again.rows() == [ROW, ROW]
    assert sorted(path.name for path in again.histories.iterdir()) == ["async-1.jsonl.xz", "async-2.jsonl.xz"]


def test_all_histories_have_a_bound_but_for_those_in_which_something_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "ALL_BYTES", 10)
    kept = Ledger(tmp_path)

    kept.append("first", ROW, bytes(8))
    kept.append("second", ROW, bytes(8))
    kept.append("third", ROW | {"violations": {"lost": 1}}, bytes(8))

    assert sorted(path.name for path in kept.histories.iterdir()) == ["first.jsonl.xz", "third.jsonl.xz"]
    assert len(kept.rows()) == 3
