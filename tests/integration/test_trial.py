"""``penstock check --try N``: prompts through a spawned engine, environments and rewards, and nothing left of it."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import ModelConfig
from penstock.console.cli.main import execute

PARTS = "tests.integration.worker_parts"
#: An interpreter whose SGLang takes an empty command line, and is the fake one; it says who it is before.
_PYTHON = """#!/bin/bash
case "$3" in
  *add_cli_args*) echo 'penstock-arguments: {arguments}'; exit;;
  *penstock-arguments*) echo "penstock-arguments: 0.5.20 {folder} 1"; exit;;
  *find_spec*) echo True; exit;;
esac
echo $$ > {folder}/pid.new; mv {folder}/pid.new {folder}/pid
{does}
"""
SERVES = f'exec {sys.executable} -m tests.integration.fake_engine "$@"'


class Tried:
    """``penstock check run.yaml --try N`` in a folder; what it said and its exit code."""

    def __init__(self, folder: Path, model: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._model, self._capsys = folder, model, capsys

    def write(self, does: str, datasets: list[dict[str, Any]], **more: Any) -> None:
        """The run, whose engine's interpreter does this."""
        arguments = json.dumps([[["device"], "one", "str", []], [["incremental-streaming-output"], "nothing", "", []]])
        python = self.folder / "python"
        python.write_text(_PYTHON.format(folder=self.folder, arguments=arguments, does=does))
        python.chmod(0o755)
        train = []
        for one in datasets:
            (self.folder / f"{one['name']}.jsonl").write_text('{"prompt": "12=", "label": "21"}\n')
            train.append({"path": f"{one['name']}.jsonl", "shuffle": False, **one})
        values = {
            "run": "demo",
            "directory": str(self.folder / "runs"),
            "model": self._model.model_dump(),
            "data": {"train": train},
            "trainer": {"batch_groups": 1},
            "rollout": {"n": 2, "sampling": {"max_new_tokens": 16}, "max_context_tokens": 512},
            "reward": {"function": f"{PARTS}:detailed", "max_attempts": 1, "key": "score"},
            "engine": {"python": str(python), "args": {"device": "cpu"}, "env": {"PYTHONPATH": os.getcwd()}},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(values | more))

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        return (execute(["check", str(self.folder / "run.yaml"), "--try", *arguments]), *self._capsys.readouterr())

    def ended(self) -> bool:
        """Whether the engine that was started is gone."""
        try:
            os.kill(int((self.folder / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture
def tried(
    tmp_path: Path, model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tried:
    # However full the disk is that this runs on.
    monkeypatch.setattr("penstock.metrics.probes.NEARLY", 2.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Tried(tmp_path, model_config, capsys)


def test_prompts_go_through_engine_environment_and_reward_and_nothing_is_left(tried: Tried) -> None:
    tried.write(SERVES, [{"name": "plain"}, {"name": "talks", "environment": f"{PARTS}:Echo"},
                         {"name": "fails", "reward": f"{PARTS}:raises"}])  # fmt: skip

    code, out, err = tried("3", "--json")

    told = json.loads(out)
    assert [one for one in told["findings"] if one["level"] != "ok"] == []
    plain, talks, fails = told["samples"]
    assert (code, err) == (2, ""), "one of them failed"
    assert (plain["job"], plain["prompt"], plain["num_generated"], plain["finish_reason"]) == (
        *("plain/0/0", "12=", 6, "stop"),
    )
    assert (plain["reward"], plain["error"]) == (6.0, "")
    assert plain["reward_info"], "what the reward gave beside the number"
    assert (talks["num_turns"] > 1, talks["error"]) == (True, "")
    assert (fails["reward"], "ArithmeticError: this reward was never any good" in fails["error"]) == (None, True)
    assert tried.ended()
    assert list((tried.folder / "temporary").iterdir()) == []
    assert not (tried.folder / "runs").exists()

    code, out, err = tried("1")
    assert (code, out.splitlines()[-3].split()) == (0, ["tried"])
    assert out.splitlines()[-1].startswith("12=")


def test_an_engine_that_does_not_start_is_a_sentence_with_its_log_and_one_mistake_keeps_all_from_being_tried(
    tried: Tried,
) -> None:
    tried.write("echo no such kernel; exit 3", [{"name": "plain"}])
    code, _, err = tried("2")
    assert (code, "no such kernel" in err) == (1, True)
    (folder,) = (tried.folder / "temporary").iterdir()
    assert str(folder) in err

    (tried.folder / "pid").unlink()
    code, _, err = tried("2", "--rollout.n=1")
    assert (code, "No prompt is tried until this error is fixed." in err) == (2, True)
    assert not (tried.folder / "pid").exists()


def test_a_signal_ends_it_with_its_engine(tried: Tried) -> None:
    tried.write("sleep 1000", [{"name": "plain"}])

    def end_it() -> None:
        while not (tried.folder / "pid").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_it, daemon=True).start()
    assert tried("2")[0] == 130
    assert tried.ended()
    assert list((tried.folder / "temporary").iterdir()) == []
