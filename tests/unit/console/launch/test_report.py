"""What a run leaves behind, and what it shows meanwhile."""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import penstock
from penstock.config import Config
from penstock.console.launch.live import Live
from penstock.console.launch.observer import setup_versions, summarize, write_summary
from penstock.console.web.curves import Uptime
from penstock.consumers.grpo.rows import read_rows
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.waits import describe
from penstock.records.causes import NoPublication
from penstock.records.worker_causes import EngineStarting, VersionLoading
from tests.unit.console.read import test_why as why


@dataclass
class Audit:
    ok: bool = True
    differences: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0


def config(**sections: Any) -> Config:
    data = {"train": [{"name": "t", "path": "t"}], "eval": [{"name": "held", "path": "h"}]}
    return Config(run="demo", model={"path": "m"}, data=data, **sections)


def step(number: int, **other: Any) -> dict[str, Any]:
    row = {"step": number, "version": number, "samples": 10, "tokens": 300, "generated_tokens": 100, "loss_tokens": 80}
    row |= {"staleness_max": 2, "staleness_mean": 1.0, "reward_mean": 0.5, "time_s": 1000.0 + number}
    return row | {"wait_s": 1.0, "step_s": 2.0, "publish_s": 1.0} | other


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_dir(folder: Path) -> Path:
    write(
        folder / "steps.jsonl",
        [step(1), step(2, samples=1), step(2, loss_tokens=40, staleness_max=3, staleness_mean=2.0), step(3)],
    )
    held = [
        {"dataset": "held", "version": v, "accuracy": a, "time_s": 1000.0 + v}
        for v, a in ((3, 0.9), (1, 0.2), (2, 0.6))
    ]
    write(folder / "eval.jsonl", [*held, {"dataset": "other", "version": 9, "accuracy": 0.0, "time_s": 1009.0}])
    write(folder / "queue.jsonl", [{"time_s": 1000.0 + t, "queued": 5 + t, "leased": 2, "ready": 1} for t in range(4)])
    return folder


def summary(folder: Path, audit: Any = None, **snapshot: Any) -> dict[str, Any]:
    return summarize(
        config(), read_rows(folder), snapshot=snapshot, audit=audit or Audit(), seconds=10.0, setup={"sglang": "1.2"}
    )


def test_the_summary_says_what_became_of_the_tokens(tmp_path: Path) -> None:
    ledger = {"train": {"heard": 400, "accounts": {"trained": 300, "redrawn": 20}, "unheard": 2}}

    found = summary(run_dir(tmp_path), tokens=ledger)

    assert (found["goodput"], found["tokens_drawn"]) == (0.75, 400)
    assert found["tokens_unreported_at_most"] == 2 * config().rollout.max_context_tokens
    assert found["tokens_by_account"] == {"trained": 300, "redrawn": 20, "undecided": 80}
    assert summary(run_dir(tmp_path))["goodput"] is None, "nothing was drawn"


def test_a_summary_counts_each_step_once_and_the_last_row_of_it(tmp_path: Path) -> None:
    made = summary(run_dir(tmp_path), counters={"weight_updates": 4, "weight_pause_us": 2_000_000})

    assert made["steps"] == 3
    assert made["samples"] == 30
    assert made["tokens"] == 300
    assert made["tokens_per_s"] == 30.0
    assert made["staleness_max"] == 3
    assert made["staleness_mean"] == 1.2
    assert (made["accuracy_first"], made["accuracy_last"]) == (0.2, 0.9)
    assert made["weight_update_pause_s_mean"] == 0.5
    assert made["trainer_wait_share"] == 0.25
    assert made["engine"] == {"name": "sglang", "version": "1.2"}
    assert (made["audit"], made["lost"], made["duplicated"]) == ("ok", 0, 0)


def test_a_summary_has_all_keys_even_of_a_run_without_rows(tmp_path: Path) -> None:
    made = summary(tmp_path)

    wanted = "engine mode bound steps samples tokens seconds tokens_per_s accuracy_first accuracy_last staleness_max"
    wanted += " staleness_mean lost duplicated audit weight_updates weight_update_pause_s_mean trainer_wait_share setup"
    assert set(wanted.split()) <= made.keys()
    assert {made[key] for key in ("accuracy_first", "staleness_mean", "staleness_max", "trainer_wait_share")} == {None}
    assert made["weight_update_pause_s_mean"] is None


def test_a_summary_names_what_the_audit_found(tmp_path: Path) -> None:
    made = summary(tmp_path, Audit(ok=False, differences=["A is 3, not 4", "job x"], lost=1, duplicated=2))

    assert made["audit"] == "A is 3, not 4; job x"
    assert (made["lost"], made["duplicated"]) == (1, 2)


def test_steps_that_a_rewind_took_back_count_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "steps.jsonl", [*map(step, range(1, 11)), step(6, time_s=1021.0), step(7, time_s=1022.0)])

    found = read_rows(tmp_path).steps

    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["time_s"] for row in found][-3:] == [1005.0, 1021.0, 1022.0]
    assert (summary(tmp_path)["steps"], summary(tmp_path)["samples"]) == (7, 70)


def test_lines_torn_by_a_kill_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "steps.jsonl", [step(1)])
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "sam' + json.dumps(step(3)) + "\n" + json.dumps(step(4)) + "\n")

    assert [row["step"] for row in read_rows(tmp_path).steps] == [1, 4]
    assert "1 lines are torn" in caplog.text


def test_what_a_run_was_down_between_two_lives_is_left_out_of_its_picture() -> None:
    up = Uptime([103.0, 100.0, 101.0, 102.5, 6000.0, 6001.0])
    assert [up.at(time) for time in (100.0, 103.0, 6000.0, 6001.0)] == [0.0, 3.0, 3.0, 4.0]


def test_the_summary_file_is_json_with_the_versions(tmp_path: Path) -> None:
    write_summary({"setup": setup_versions("7.0", "0.5")}, tmp_path / "summary.json")

    setup = json.loads((tmp_path / "summary.json").read_text())["setup"]
    assert (setup["redis"], setup["sglang"]) == ("7.0", "0.5")
    assert setup["torch"][0].isdigit()


SNAPSHOT: dict[str, Any] = {
    "version": 12,
    "step": 12,
    "parts": [],
    "subs": [],
    "lanes": {"train": {"queued": 5, "leased": 2}, "eval": {"queued": 1, "leased": 0}},
    "ready": 4,
    "workers": [WorkerPresence(name="worker-0", version=12, running=7, slots=64, tokens_per_s=1234.6, state="serving")],
    "trainers": [{"name": "actor", "step": 12, "reward_mean": 0.41, "staleness_max": 3, "staleness_mean": 1.25}],
    "waits": [
        {"who": "worker:worker-0:intake", "since_s": 7.0, **describe(VersionLoading(12))},
        {"who": "actor", "since_s": 3.0, **describe(EngineStarting())},
        {"who": "producer", "since_s": 0.1, **describe(why.GATE)},
    ],
}


def shown(terminal: bool, snapshots: Iterable[dict[str, Any]], clock: Any = None) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with Live(config(), console, clock or (lambda: 0.0)) as live:
        for snapshot in snapshots:
            live.update(snapshot, {"accuracy": 0.75})
    return out.getvalue()


def test_the_live_view_tells_figures_and_what_each_part_waits_for() -> None:
    for terminal in (False, True):
        text = " ".join(shown(terminal, [SNAPSHOT]).split())

        for figure in (
            "evaluating",
            "1 to go",
            "12/100",
            "0.410",
            "0.750",
            "1.25 (max 3)",
            "1,235",
            str(VersionLoading(12)),
            str(EngineStarting()),
        ):
            assert figure in text
        assert str(why.GATE) not in text  # a moment is no wait


def test_a_line_says_what_a_wait_comes_down_to() -> None:
    """Whoever has nothing but the log of a run that stands still reads why."""
    engine = ("worker:w.1:engine", cause := EngineStarting())
    seen = why.state(("trainer:actor", why.BATCH), ("buffer:actor", why.RUNNING), engine, leased=3)

    assert shown(False, [seen]).partition(" | ")[2].strip() == (
        f"trainer:actor waits for {why.BATCH} (9 s), because worker:w.1:engine waits for {cause} (7 s)"
    )


def test_nobody_is_told_to_start_what_the_launcher_starts() -> None:
    publication = NoPublication("policy")
    line = shown(False, [why.state(("producer", publication), subs=[])])

    assert line.partition(" | ")[2].strip() == f"producer waits for {publication} (9 s)"


def test_the_live_view_bears_an_empty_snapshot() -> None:
    assert "step -/100" in shown(False, [{}])
    assert "held-out" in shown(True, [{}])


def test_plain_lines_come_every_few_seconds() -> None:
    now = [0.0]

    def snapshots() -> Iterator[dict[str, Any]]:
        for second in range(12):
            now[0] = float(second)
            yield {**SNAPSHOT, "version": second}

    text = shown(False, snapshots(), clock=lambda: now[0])

    assert [line[:7] for line in text.splitlines()] == ["[00:00]", "[00:05]", "[00:10]"]


def test_the_time_that_is_left_is_reckoned_by_the_last_steps_and_not_by_the_start() -> None:
    now = [0.0]

    def snapshots() -> Iterator[dict[str, Any]]:
        for at, step in ((0.0, 0), (300.0, 1), (310.0, 2), (320.0, 4), (500.0, 3), (530.0, 4)):
            now[0] = at
            yield {"trainers": [{"step": step}]}

    told = [line.partition("left ")[2] for line in shown(False, snapshots(), clock=lambda: now[0]).splitlines()]

    # 98 steps of 10 s, then 96 of 6.7 s; it went back, and 96 of 30 s.
    assert told == ["", "", "16 min", "11 min", "", "48 min"]


def test_a_line_that_says_the_same_comes_once_a_minute() -> None:
    now = [0.0]

    def snapshots() -> Iterator[dict[str, Any]]:
        for second in range(130):
            now[0] = float(second)
            waits = [{"who": "trainer", "since_s": second + 2.0, **describe(EngineStarting())}]
            yield {"waits": waits, "step": int(second >= 70), "parts": [], "subs": [], "workers": []}

    text = shown(False, snapshots(), clock=lambda: now[0])

    assert [line[:7] for line in text.splitlines()] == ["[00:00]", "[01:00]", "[01:10]"]


def test_the_version_of_penstock_is_told_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("penstock.console.launch.observer.version", not_installed)

    assert setup_versions("7.2", "0.5.17")["penstock"] == penstock.__version__
