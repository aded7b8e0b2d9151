"""A night keeps what each run came to and goes on, whatever was found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.night import __main__ as nights
from tests.chaos.night import one_run
from tests.chaos.night.choice import Run
from tests.chaos.night.ledger import Ledger
from tests.chaos.night.one_run import Made, make

RUN = Run("async", 3, ("kill:worker",), 4, "7.0.15", Path("redis-server"))
RESULT: dict[str, Any] = {
    "faults": {"kill:worker": 4}, "counted": {"kill:worker": 3}, "recovery_s": {"kill:worker": [1.0]}, "missed": {},
    "violations": {}, "operations": {}, "batches": 9, "unchecked": {}, "ends": [], "words": [],
}  # fmt: skip


def pretend(monkeypatch: pytest.MonkeyPatch, out: str, err: str = "") -> None:
    """A run that leaves a folder and says this."""

    def process(run: Run, folder: Path) -> tuple[str, str]:
        (folder / "history").mkdir(parents=True)
        (folder / "nemesis.jsonl").write_text("{}\n")
        return out, err

    monkeypatch.setattr(one_run, "_process", process)


def test_a_run_that_was_good_leaves_a_row_and_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, json.dumps(RESULT))

    made = make(RUN, tmp_path / "kept")

    assert made.folder is None
    assert made.history
    assert made.row.items() >= {"seed": 3, "workload": "async", "redis": "7.0.15", "asked": 4}.items()
    assert made.row["counted"] == {"kill:worker": 3}


@pytest.mark.parametrize(
    ("out", "err", "violations"),
    [
        (json.dumps(RESULT | {"violations": {"lost": 1}, "words": ["lost: a job"]}), "", {"lost": 1}),
        ("", "it did not end in 1 s", {"run": 1}),
    ],
)
def test_a_run_in_which_something_was_found_keeps_its_folder(
    out: str, err: str, violations: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, out, err)

    made = make(RUN, tmp_path / "kept")

    assert made.row["violations"] == violations
    assert made.row["words"] in (["lost: a job"], [err])
    assert made.folder == tmp_path / "kept" / "async-3"
    assert (made.folder / "nemesis.jsonl").exists()


def test_a_night_goes_on_behind_the_runs_that_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Run] = []

    def pretended(run: Run, kept: Path) -> Made:
        made.append(run)
        if len(made) == 3:
            night._ended.set()
        row = RESULT | {"seed": run.seed, "workload": run.workload, "kinds": list(run.kinds), "wall_s": 1.0}
        return Made(row | {"violations": {"lost": 1} if len(made) == 1 else {}}, b"history", None)

    monkeypatch.setattr(nights, "make", pretended)
    monkeypatch.setattr(nights, "version_of", lambda binary: binary.name)
    monkeypatch.setattr(nights.signal, "signal", lambda *_: None)
    ledger = Ledger(tmp_path)
    ledger.append("async-7", RESULT | {"seed": 7, "workload": "async", "kinds": ["kill:worker"]}, b"")
    servers = [Path("6.2.14"), Path("7.0.15")]
    night = nights.Night(ledger, servers, ["async", "sync"], faults=6, kept=tmp_path / "kept", paused=None)

    night.run(1, 1.0)

    assert [one.seed for one in made] == [8, 9, 10]
    assert [one.redis for one in made] == ["6.2.14", "7.0.15", "6.2.14"]
    assert [row["seed"] for row in Ledger(tmp_path).rows()] == [7, 8, 9, 10]
    assert {one.workload for one in made} == {"async", "sync"}
    said = capsys.readouterr().out
    assert said.count("FOUND {'lost': 1}") == 1
    assert "--seed 8 --faults 6" in said


def test_no_run_is_begun_while_a_night_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused, begun = tmp_path / "paused", []
    paused.touch()
    monkeypatch.setattr(nights, "make", lambda run, kept: begun.append(run))
    monkeypatch.setattr(nights.signal, "signal", lambda *_: None)
    night = nights.Night(Ledger(tmp_path), [Path("redis")], ["async"], faults=6, kept=tmp_path / "kept", paused=paused)
    monkeypatch.setattr(night._ended, "wait", lambda s: night._ended.set())

    night.run(1, 1.0)

    assert begun == []
