"""A run in which something was found is made again, until nothing is found."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.night import again
from tests.chaos.night.again import cleared_by, to_make_again
from tests.chaos.night.table import report

SERVERS = [Path("six"), Path("seven")]


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "version_of", {Path("six"): "6.2.14", Path("seven"): "7.0.15"}.get)


def row(workload: str, seed: int, **violations: int) -> dict[str, Any]:
    asked = {"workload": workload, "seed": seed, "kinds": ["kill:redis"], "asked": 9, "redis": "7.0.15", "commit": "c"}
    return asked | {"faults": {}, "counted": {}, "recovery_s": {}, "wall_s": 1.0, "violations": violations}


def test_a_run_is_made_again_as_it_was_until_nothing_is_found() -> None:
    rows = [row("async", 1, lost=1), row("drop", 2, rest=1), row("drop", 2), row("sync", 3), row("async", 1, rest=1)]

    (run,) = to_make_again(rows, SERVERS)

    assert (run.workload, run.seed, run.kinds, run.faults) == ("async", 1, ("kill:redis",), 9)
    assert (run.redis_server, run.name) == (Path("seven"), "async-1-3")
    assert list(cleared_by(rows)) == [("drop", 2)]


def test_a_finding_that_is_gone_is_said_to_be() -> None:
    said = report([row("drop", 2, rest=1), row("drop", 2), row("async", 1, lost=1)]).splitlines()

    assert "- drop seed 2, Redis 7.0.15, c: rest 1; made again at c: nothing" in said
    assert "- async seed 1, Redis 7.0.15, c: lost 1" in said
