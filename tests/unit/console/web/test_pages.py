"""What the page's server answers of runs that are over, or whose files are not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.console.cli.target import RunUnknown
from penstock.console.web.app import make_app
from tests.unit.console.web.run_files import CONFIG, lines, make_run, step

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J\u202e\ud800 \x00"


def ask(directory: Path, path: str, **parameters: Any) -> Any:
    client = TestClient(make_app(directory), base_url="http://127.0.0.1:8420", raise_server_exceptions=True)
    answer = client.get(f"/api{path}", params=parameters)
    assert answer.headers["content-type"] == "application/json"
    return answer.json() | {"status": answer.status_code}


def test_runs_are_listed_with_how_far_they_came(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    make_run(tmp_path, "two", state="failed", reason="no room")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "x.json").write_text("{}")

    rows = {row["run"]: row for row in ask(tmp_path, "/runs")["runs"]}

    assert rows.keys() == {"one", "two"}
    assert (rows["one"]["state"], rows["one"]["step"], rows["one"]["reward_mean"]) == ("finished", 5, 0.5)
    assert rows["one"]["accuracy"] == 0.3
    assert (rows["two"]["state"], rows["two"]["reason"]) == ("failed", "no room")


def test_a_run_that_nobody_holds_was_killed(tmp_path: Path) -> None:
    make_run(tmp_path, state="running")
    assert ask(tmp_path, "/runs/demo/overview")["state"] == "killed"


def test_the_overview_of_an_ended_run_is_what_its_files_say(tmp_path: Path) -> None:
    make_run(tmp_path)
    seen = ask(tmp_path, "/runs/demo/overview")
    assert (seen["live"], seen["state"], seen["active_s"]) == (False, "finished", 60.0)
    assert "No Redis is known for run 'demo'" in seen["silent"]
    assert "--redis" not in seen["silent"], "the page has no such option"
    figures = seen["figures"]
    assert (figures["step"], figures["steps"], figures["reward"], figures["held_out"]) == (5, 50, 0.5, 0.3)
    assert (figures["samples"], figures["tokens_per_s"], figures["audit"]) == (50, 12.5, "ok")


def test_a_redis_without_the_run_is_told_in_words_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(*_: Any, **__: Any) -> Any:
        raise RunUnknown("Redis at redis://h:1/0 knows no run 'demo': correct --run, --redis or --directory.")

    folder = make_run(tmp_path, state="running")
    (folder / "redis.json").write_text('{"url": "redis://127.0.0.1:1/0"}')
    monkeypatch.setattr("penstock.console.web.runs.Target", target)
    seen = ask(tmp_path, "/runs/demo/overview")["silent"]
    assert "The Redis of run 'demo' has nothing of it" in seen
    assert "--" not in seen, "the page has no options"


def test_the_version_of_an_ended_run_is_the_last_that_its_files_know_of(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert ask(tmp_path, "/runs/demo/overview")["figures"]["version"] == 5
    lines(folder / "eval.jsonl", [{"dataset": "held", "version": 6, "accuracy": 0.5, "time_s": 1010.0}])
    assert ask(tmp_path, "/runs/demo/overview")["figures"]["version"] == 6


def test_an_empty_run_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.yaml").write_text(CONFIG)
    assert ask(tmp_path, "/runs/demo/overview")["figures"]["step"] is None
    assert ask(tmp_path, "/runs/demo/curves")["charts"] == []


@pytest.mark.parametrize("path", ["overview", "curves", "settings", "lists/lanes", "lists/jobs", "events"])
@pytest.mark.parametrize("run", ["none", "..", "%2e%2e%2fdemo", "demo.prev"])
def test_an_unknown_run_is_a_sentence(tmp_path: Path, run: str, path: str) -> None:
    make_run(tmp_path / "runs")
    make_run(tmp_path, "demo")
    found = ask(tmp_path / "runs", f"/runs/{run}/{path}")
    assert found["status"] == 404
    assert "error" in found or found["detail"] == "Not Found"


@pytest.mark.parametrize("path", ["lists/lanes", "lists/jobs", "lists/dead", "job"])
def test_the_queue_of_an_ended_run_says_why_it_is_not_there(tmp_path: Path, path: str) -> None:
    make_run(tmp_path)
    found = ask(tmp_path, f"/runs/demo/{path}", id="d/0/1")
    assert (found["status"], "No Redis is known" in found["error"]) == (400, True)


def test_curves_are_those_of_the_rows(tmp_path: Path) -> None:
    make_run(tmp_path)
    charts = {one["id"]: one for one in ask(tmp_path, "/runs/demo/curves")["charts"]}
    assert charts["reward"]["lines"] == [
        {"name": "reward", "step": [1, 2, 3, 4, 5], "up_s": [1, 2, 3, 4, 5], "value": [0.1, 0.2, 0.3, 0.4, 0.5]}
    ]
    assert charts["held-out"]["lines"][0] == {"name": "held", "step": [0, 2], "up_s": [0.5, 3.5], "value": [0, 0.3]}
    assert charts["staleness"]["bound"] == 4
    assert charts["length"]["lines"][0]["value"] == [10] * 5
    assert charts["masked"]["lines"][0]["value"] == [0.5] * 5
    assert charts["wait"]["lines"][0]["value"] == [0.25] * 5
    assert [line["name"] for line in charts["depth"]["lines"]] == ["queued", "leased", "ready"]
    assert "entropy" not in charts, "nothing was written of it"


def test_rows_that_come_are_in_the_next_answer(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    before = ask(tmp_path, "/runs/demo/overview")
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(step(6)) + "\n")
    after = ask(tmp_path, "/runs/demo/overview")
    assert (before["figures"]["step"], after["figures"]["step"]) == (5, 6)
    assert before["moved"] != after["moved"]


@pytest.mark.parametrize("value", [HOSTILE, None, [], {}, True, 10**400, float("nan"), float("inf"), "1e999"], ids=repr)
def test_values_that_no_part_writes_harm_nothing(tmp_path: Path, value: Any) -> None:
    folder = make_run(tmp_path)
    lines(folder / "steps.jsonl", [step(1, reward_mean=value, wait_s=value), step(2, time_s=value), step(3)])
    lines(folder / "eval.jsonl", [{"dataset": value, "version": 1, "accuracy": value, "time_s": value}])
    (folder / "summary.json").write_text(json.dumps({"audit": value}))
    charts = {one["id"]: one for one in ask(tmp_path, "/runs/demo/curves")["charts"]}
    assert charts["reward"]["lines"][0]["value"][-1] == 0.3
    assert ask(tmp_path, "/runs/demo/overview")["status"] == 200
    assert ask(tmp_path, "/runs")["status"] == 200


@pytest.mark.parametrize(
    "name", ["steps.jsonl", "eval.jsonl", "queue.jsonl", "summary.json", "run.json", "config.yaml", "redis.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 50_000, b"null\n[]\n7\n"], ids=repr)
def test_a_damaged_file_is_a_sentence_or_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_run(tmp_path)
    (folder / name).write_bytes(content)
    assert ask(tmp_path, "/runs")["status"] == 200
    for path in ("overview", "curves"):
        assert ask(tmp_path, f"/runs/demo/{path}")["status"] == 200, path
    assert ask(tmp_path, "/runs/demo/settings")["status"] in (200, 400)


def test_hostile_text_comes_as_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path, reason=HOSTILE)
    lines(folder / "eval.jsonl", [{"dataset": HOSTILE, "version": 1, "accuracy": 0.5, "time_s": 1001.0}])
    charts = {one["id"]: one for one in ask(tmp_path, "/runs/demo/curves")["charts"]}
    assert charts["held-out"]["lines"][0]["name"].startswith(
        "</script><img src=x onerror=alert(1)>\x1b[2J\u202e\\ud800"
    )
    assert ask(tmp_path, "/runs/demo/overview")["reason"].startswith("</script>")


def test_a_configuration_is_shown_key_by_key_without_passwords(tmp_path: Path) -> None:
    make_run(tmp_path)
    held = dict(ask(tmp_path, "/runs/demo/settings")["settings"])
    assert held == {"run": "demo", "staleness.bound": 4, "trainer.steps": 50, "trainer.lr": 0.001,
                    "redis.url": "redis://:***@h:1/0"}  # fmt: skip


def test_two_configurations_are_compared_key_by_key(tmp_path: Path) -> None:
    make_run(tmp_path)
    other = make_run(tmp_path, "other")
    (other / "config.yaml").write_text(CONFIG.replace("0.001", "0.01").replace("steps: 50, ", ""))
    found = ask(tmp_path, "/runs/demo/settings", other="other")["differences"]
    assert found == [["trainer.lr", 0.001, 0.01], ["trainer.steps", 50, None]]
    assert ask(tmp_path, "/runs/demo/settings", other="none")["status"] == 404
