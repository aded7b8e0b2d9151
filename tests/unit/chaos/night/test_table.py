"""The table of a night: faults against their targets, seconds to recover, and what was found."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.night import table
from tests.chaos.night.ledger import Ledger
from tests.chaos.places import RESULTS

ROW: dict[str, Any] = {
    "workload": "async", "seed": 1, "redis": "7.0.15", "commit": "abc", "wall_s": 90.0, "violations": {},
    "kinds": ["kill:worker"], "faults": {"kill:worker": 3}, "counted": {"kill:worker": 2},
    "recovery_s": {"kill:worker": [1.0, 3.0]},
}  # fmt: skip


def test_it_adds_up_faults_and_names_what_was_found() -> None:
    found = ROW | {"seed": 2, "violations": {"lost": 1}, "recovery_s": {"kill:worker": [5.0]}}

    said = table.report([ROW, found])

    assert "2 runs of 1 workloads in 0.1 hours, Redis 7.0.15: 6 faults, 4 of which count, the network's 0%" in said
    assert "| `kill:worker` | 6 | 4 | 300 | 3.0 | 5.0 |" in said
    assert "| `kill:engine of SGLang` | 0 | 0 | 100 | - | - |" in said
    assert "- async seed 2, Redis 7.0.15, abc: lost 1" in said


def test_it_is_put_into_its_place_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}old\n{table.END}after\n")

    table.write([ROW], page)
    table.write([ROW], page)

    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}")
    assert text.endswith(f"{table.END}after\n")
    assert text.count("| `kill:worker` | 2 | 2.0 | 3.0 |") == 1
    assert "old" not in text


def test_a_page_without_a_place_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")

    with pytest.raises(ValueError, match="no place for the table"):
        table.write([ROW], page)


def test_the_page_says_what_the_kept_runs_came_to() -> None:
    """``python -m tests.chaos.night --write-docs`` makes it so."""
    rows = Ledger(RESULTS).rows()

    assert table.section(rows) in table.PAGE.read_text(encoding="utf-8")
