"""What a fleet serves: its processes by state and its groups, as it shows them in Redis too."""

from typing import Any

from penstock.workers.fleet.launcher import ProcessState
from penstock.workers.fleet.state import FleetCollector


def served(record: dict[str, Any]) -> dict[tuple[str, ...], float]:
    families = FleetCollector(lambda: record).collect()
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def process(name: str, kind: str, state: str, starts: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "state": state, "starts": starts}


def test_processes_are_counted_by_state_and_groups_by_engines() -> None:
    found = served(
        {
            "processes": [
                process("a.0", "worker", ProcessState.RUNNING, 1),
                process("a.1", "worker", ProcessState.RUNNING, 3),
                process("a.2", "worker", ProcessState.CRASH_LOOP, 9),
            ],
            "groups": {"a.main": {"engines": 3, "leaving": 1, "refused": "no GPU is free"}},
        }
    )
    assert found == {
        ("penstock_fleet_processes", "worker", "running"): 2,
        ("penstock_fleet_processes", "worker", "crash loop"): 1,
        ("penstock_fleet_process_starts_total", "a.0"): 1,
        ("penstock_fleet_process_starts_total", "a.1"): 3,
        ("penstock_fleet_process_starts_total", "a.2"): 9,
        ("penstock_fleet_engines", "a.main"): 3,
        ("penstock_fleet_leaving_engines", "a.main"): 1,
        ("penstock_fleet_refused", "a.main"): 1,
    }


def test_a_fleet_that_has_shown_nothing_yet_serves_nothing() -> None:
    assert served({}) == {}
