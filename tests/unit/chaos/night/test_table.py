"""The table of a night: faults against their targets, seconds to recover, and what was found."""

from typing import Any

from tests.chaos.night import table

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


def test_the_summary_has_each_fault_each_workload_and_the_seeds_that_found_something() -> None:
    found = ROW | {"workload": "sync", "seed": 7, "violations": {"lost": 1}}

    page = table.page([ROW, found])

    assert "| `kill:worker` | 4 | 2.0 | 3.0 |" in page
    assert "| `async` | 1 | kill:worker 2 |" in page
    assert "- sync seed 7, Redis 7.0.15, abc: lost 1" in page


def test_the_repository_has_a_summary() -> None:
    assert table.SUMMARY.read_text(encoding="utf-8").startswith("# Runs under faults")
