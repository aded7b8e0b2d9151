"""``penstock reward try``: a reward over the answers of a file, or of a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.load import save_resolved
from penstock.console.cli import main as cli
from penstock.history.writer import HistoryWriter
from tests.unit.penstock.history.rows import row

MODULE = """
def graded(sample):
    if "boom" in sample.text:
        raise KeyError("gone")
    print("what a reward prints is no part of what is told")
    return {"score": len(sample.turns[-1]), "hint": sample.job.metadata.get("hint"), "label": sample.job.raw_label}
def broken(sample): return None
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert cli.execute(["reward", "try", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_answers_of_a_file_are_scored_and_held_against_what_they_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(
        tmp_path / "answers.jsonl",
        {"prompt": "2+3=", "response": "5", "label": "5", "reward": 0},
        {"prompt": "2+3=", "response": " 5\n", "label": 5, "reward": 1, "id": "sums/0/7"},
        {"prompt": [{"role": "user"}], "response": "6"},
    )
    found = asked(capsys, "--function", "exact_match", "--file", file)
    assert [one["now"] for one in found["rows"]] == [1.0, 1.0, 0.0]
    assert [one["differs"] for one in found["rows"]] == [True, False, False]
    assert found["rows"][1]["id"] == "sums/0/7/0"
    assert found["summary"] == {
        "samples": 3, "scored": 3, "mean": pytest.approx(2 / 3), "mean_then": 0.5, "had": 2, "differ": 1,
        "failures": {},
    }  # fmt: skip
    assert len(asked(capsys, "--function", "exact_match", "--file", file, "--limit", "2")["rows"]) == 2


def test_a_table_shows_failures_by_name_and_their_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(tmp_path / "a.jsonl", {"response": "abc\x1b[2J"}, {"response": "boom"}, {"response": "boom 2"})
    assert cli.execute(["reward", "try", "--function", "tried_rewards:graded", "--file", file]) == 0
    told = capsys.readouterr()
    title, head, first, second, _, summary = told.out.splitlines()
    assert title == "scored"
    assert head.split() == ["id", "prompt", "response", "label", "then", "now", "failure", "info", "seconds"]
    assert "\x1b" not in first
    assert first.split()[4:6] == ["-", "7"]
    assert "reward_raised" in second
    assert summary == "3 answers, 1 scored; mean 7; failed: reward_raised 2"
    assert "reward tried_rewards:graded raised KeyError" in told.err


def test_a_reward_lies_beside_where_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "reward_of_here.py").write_text("def one(sample): return 1")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = lines(tmp_path / "a.jsonl", {"response": "a"})
    assert asked(capsys, "--function", "reward_of_here:one", "--file", file)["summary"]["mean"] == 1


def test_the_exit_code_is_1_where_all_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(tmp_path / "a.jsonl", {"response": "a"})
    found = asked(capsys, "--function", "tried_rewards:broken", "--file", file, code=1)
    assert found["summary"]["failures"] == {"reward_not_a_number": 1}
    assert found["rows"][0]["now"] is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a run that is over, with the history of its answers, and the data that it had."""
    data = lines(
        tmp_path / "train.jsonl",
        {"prompt": "2+3=", "label": 5, "about": {"hint": "add"}},
        {"prompt": "1+1=", "label": 2, "about": {"hint": "add too"}},
    )
    heldout = lines(tmp_path / "held.jsonl", {"prompt": "2+2=", "label": "4"})
    folder = tmp_path / "runs" / "demo"
    (folder / "redis").mkdir(parents=True)
    (folder / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
    (folder / "redis.json").write_text('{"url": "redis://127.0.0.1:1/0"}')
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    writer.write([
        row("sums/0/0", answer="five", label="5", reward=0.0),
        row("sums/0/1", answer="two", label="3", reward=3.0),
        row("held/1/0", answer="4", label="4", reward=1.0, lane="eval"),
    ])  # fmt: skip
    writer.close()
    made = Config.model_validate(
        {
            "run": "demo",
            "directory": tmp_path / "runs",
            "model": {"path": str(tmp_path)},
            "data": {
                "train": [{"name": "sums", "path": data, "metadata_key": "about"}],
                "eval": [{"name": "held", "path": heldout, "reward": "exact_match"}],
            },
            "reward": {"function": "tried_rewards:graded"},
        }
    )
    save_resolved(made, folder / "config.yaml")
    return folder / "config.yaml"


def test_answers_of_a_run_are_scored_with_the_labels_and_metadata_of_its_data(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, str(config))
    rows = {one["id"]: one for one in found["rows"]}
    assert list(rows) == ["held/1/0/0", "sums/0/1/0", "sums/0/0/0"], "the latest first"
    assert rows["sums/0/0/0"]["info"] == {"hint": "add", "label": 5}
    assert rows["sums/0/1/0"]["info"] == {"hint": None, "label": "3"}, "the line has another label by now"
    assert (rows["held/1/0/0"]["now"], rows["held/1/0/0"]["info"]) == (1.0, {}), "its dataset has its own reward"
    assert found["summary"]["differ"] == 1
    found = asked(capsys, "--run", "demo", "--directory", str(config.parent.parent), "--dataset", "sums")
    assert [one["now"] for one in found["rows"]] == [3.0, 4.0]
    found = asked(capsys, "--run", "demo", "--directory", str(config.parent.parent), "--reward.key=hint", code=0)
    assert found["summary"]["failures"] == {"reward_not_a_number": 2}
    found = asked(capsys, str(config), "--function", "exact_match", "--lane", "train")
    assert [one["now"] for one in found["rows"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "No reward is named"),
        (["--function", "mat", "--file", "x"], "unknown reward 'mat': did you mean math?"),
        (["--function", "math", "--file", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--function", "math", "--file", "/dev/null"], "there is no file /dev/null"),
        (["--function", "math", "--file", "EMPTY"], "EMPTY holds no answer: give lines of prompt, response and label."),
        (["--function", "remote_rm", "--file", "x"], "set it to the address of the scoring service.\n"),
        (["--function", "math", "--file", "x", "--run", "y"], "give one of them"),
        (["--function", "math", "--reward.key=acc", "--file", "x"], "changes a configuration"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    assert cli.execute(["reward", "try", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"answer": "5"}, "line 2: `response` must be the text of an answer"),
        ({"response": "5", "metadata": []}, ""),
        ({"response": "5", "metadata": [1]}, "line 2: `metadata` must be a map"),
        ({"response": "5", "reward": "1"}, "line 2: `reward` must be a number"),
    ],
)
def test_a_line_that_is_no_answer_is_named(
    bad: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "a.jsonl", {"response": "a"}, bad)
    assert cli.execute(["reward", "try", "--function", "f1", "--file", file]) == (2 if said else 0)
    assert said in capsys.readouterr().err
