"""What is shown of a fleet: decisions of its autoscaler as far as they can be read."""

from typing import Any

import pytest

import penstock.workers.fleet.state
from penstock.console.details import detail_lines
from penstock.console.read.parts import fleet_of, read_fleet
from penstock.errors import ConfigError

DECISION = {"at": 7.0, "before": 1, "engines": 2, "wanted": 2, "binds": "demand", "terms": {"demand": 2}}
STATE = {
    "host": "h", "age_s": 0.5, "groups": {"policy.r": {"worker_type": "regular", "engines": 2}}, "endpoints": {},
    "processes": [{"name": "p"}], "autoscale": {"group": "policy.r", "binds": "max", "decisions": [DECISION]},
}  # fmt: skip


def read(monkeypatch: pytest.MonkeyPatch, state: Any) -> Any:
    def of(*_: Any) -> Any:
        if state is None:
            raise ConfigError("No fleet is running.")
        return state

    monkeypatch.setattr(penstock.workers.fleet.state, "read_state", of)
    return read_fleet(None, None)  # type: ignore[arg-type]


def test_a_fleet_is_its_groups_processes_and_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, STATE)
    assert found["groups"] == [{"group": "policy.r", "worker_type": "regular", "engines": 2}]
    assert (found["autoscale"], found["decisions"]) == ({"group": "policy.r", "binds": "max"}, [DECISION])


def test_a_fleet_is_lines_of_text() -> None:
    lines = list(detail_lines(fleet_of(STATE | {"autoscale": {"decisions": [DECISION | {"at": 1.7e9}]}})))
    assert "  policy.r  regular      2" in lines
    assert "  2023-11-14T22:13:20.000Z  1       2        2       demand  demand 2" in lines


def test_where_none_runs_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, None) is None


@pytest.mark.parametrize("told", [None, 7, "x", {}, [None, 7, "x"], [[]]], ids=repr)
def test_decisions_that_nobody_wrote_are_left_out(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    assert read(monkeypatch, STATE | {"autoscale": {"decisions": told}})["decisions"] == []


def test_the_latest_decision_is_the_first_and_others_fields_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [DECISION | {"at": float(n), "cat": 1} for n in range(300)]
    found = read(monkeypatch, STATE | {"autoscale": {"decisions": told}})["decisions"]
    assert (len(found), found[0]["at"], "cat" in found[0]) == (300, 299.0, False)
