"""``penstock check``: every mistake of a configuration at once, and nothing started or left behind."""

import json
from pathlib import Path

import pytest

from penstock.config.load import load_config
from penstock.console.cli import check
from penstock.console.cli import main as cli
from penstock.console.launch import trials
from penstock.errors import ConfigError
from penstock.metrics.probes import Finding, Level

YAML = "run: demo\nmodel: {path: m}\ndata: {train: [{name: t, path: t.jsonl}]}\nstaleness: {mode: one_step}\n"
#: What is wrong with a configuration -> words of its line.
WRONG = {
    "subscription": "mode one_step trains complete cohorts, but sampler is fifo",
    "engine's interpreter": "there is no interpreter",
    "data and policy": "there is no file",
    "redis": "No Redis answers at redis://:***@127.0.0.1:1/0",
    "payload server p1": "No Redis answers",
    "placement": "this machine has no GPU",
}
SET = [
    "--trainer.subscription.sampler=fifo",
    "--engine.python=/nowhere/python",
    "--engine.preset=cuda",
    "--redis=redis://:hush@127.0.0.1:1/0",
    "--redis.payload_servers={p1: redis://127.0.0.1:1/0}",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_every_mistake_is_told_at_once_and_nothing_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["check", "run.yaml", *SET, "--json"]) == 2

    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    for what, words in WRONG.items():
        assert (found[what]["level"], words in found[what]["found"]) == ("error", True), found[what]
    assert found["sampling"]["level"] == "ok"
    assert "hush" not in json.dumps(found)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_errors_come_first_each_once_and_the_rest_if_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m").mkdir()
    Path("m", "config.json").write_text("{}")
    Path("t.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    wrong = ["check", "run.yaml", "--engine.python=/nowhere/python", "--trainer.colocate=true"]

    assert cli.execute(wrong) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "folder" not in line] == ["error", "error", "warning"]
    assert sum("nowhere" in line for line in lines) == 1
    assert "trainer.colocate gives the trainer's GPUs to the engines" in lines[1]
    assert "trainer.batch_groups is 32, and data.train has 1 prompts" in lines[2]

    assert cli.execute([*wrong, "-v"]) == 2
    assert "ok       sampling: fine" in capsys.readouterr().out.splitlines()


def test_an_engine_that_does_not_answer_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["check", "run.yaml", "--engine.url=http://127.0.0.1:9"]) == 2

    out = capsys.readouterr().out
    assert "error    engine.url: engine.url http://127.0.0.1:9 does not answer as an SGLang server" in out


def test_rows_of_ones_own_code_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_rows.py").write_text(
        "import time\n"
        "class Rows:\n"
        "    def __init__(self, row, since): self.given, self.year = row, since.year\n"
        "    def __len__(self): return 3\n"
        "    def row(self, index):\n"
        "        print('reading')\n"
        "        while self.given == 'never': time.sleep(1)\n"
        "        return {'prompt': 'p', 'label': {1: 2, 'a': 3} if self.given == 'bad' else '1'}\n"
    )

    def found(row: str) -> list[tuple[str, str]]:
        given = (
            f"--data.train=[{{name: t, path: 'python:own_rows:Rows', source_args: {{row: {row}, since: 2024-01-01}}}}]"
        )
        return [(one.level, one.found) for one in check._own_rows(load_config(folder / "run.yaml", [given]))]

    assert found("good") == [("ok", "fine")]
    with pytest.raises(ConfigError, match=r"dataset t: own_rows:Rows: row\(0\) has a value that JSON cannot represent"):
        found("bad")
    monkeypatch.setattr(check, "_LOOK_S", 0.5)
    assert found("never") == [("warning", "python:own_rows:Rows took longer than 0.5 s")]
    assert check._own_rows(load_config(folder / "run.yaml", [])) == []


def test_it_says_in_words_what_a_start_would_do_with_an_earlier_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "demo").mkdir(parents=True)
    (folder / "runs" / "demo" / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
    # However full the disk is that this runs on.
    monkeypatch.setattr(
        "penstock.console.cli.check.look_at_disk", lambda what, path: Finding(what, Level.OK, f"{path}: room")
    )

    assert cli.execute(["check", "run.yaml", "--engine.python=/nowhere/python"]) == 2

    out, err = capsys.readouterr()
    assert "warning  run: demo is finished: a start begins anew, and moves it to .prev\n" in out
    assert err.endswith(" errors, 1 warning\n")


def test_a_file_that_cannot_be_read_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["check", "none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("penstock: There is no configuration none.yaml")


def test_what_a_reward_prints_is_no_part_of_what_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "check_data", lambda config: None)
    monkeypatch.setattr(trials, "try_prompts", lambda *_: print("scoring") or [])
    config = load_config(folder / "run.yaml", [])
    assert check._try(folder / "run.yaml", config, [], 1, as_json=True) == []
    assert capsys.readouterr() == ("", "scoring\n")
