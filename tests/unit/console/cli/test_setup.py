"""`penstock init` writes a run that loads, and `penstock engine install` where penstock finds the engine."""

import json
from pathlib import Path

import pytest

from penstock.config.engine import default_python
from penstock.config.load import check_files, load_config
from penstock.console.cli.main import execute
from penstock.console.first_run import digits
from penstock.hooks.user_imports import check_user_code


@pytest.mark.parametrize("preset", ["cpu", "cuda"])
def test_init_writes_a_run_that_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.setattr("penstock.config.engine.preset_of_machine", lambda: preset)
    settings = digits.Settings
    monkeypatch.setattr(digits, "Settings", lambda: settings(num_train=8, num_heldout=2, steps=2, hidden=16))

    assert execute(["init", str(tmp_path / "new")]) == 0

    monkeypatch.chdir(tmp_path / "new")
    config = load_config(Path("run.yaml"), [], {})
    check_files(config)
    check_user_code(config)
    assert (config.prepare, config.engine.preset, config.run) == (None, preset, "digits")
    assert config.reward.function == "reward:is_sorted"
    assert len(Path("data/train.jsonl").read_text().splitlines()) == 8


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("run: mine\n")

    assert execute(["init", str(tmp_path)]) == 2

    assert "run.yaml exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_an_engine_is_found_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment" / ".venv"))
    installed = tmp_path / "data" / "penstock" / "engine" / "bin" / "python"
    assert default_python() == str(installed), "an error names where it would be"

    for found in (installed, tmp_path / "environment/.engine/bin/python", tmp_path / ".engine/bin/python"):
        found.parent.mkdir(parents=True)
        found.touch()
        assert default_python() == str(found)


def test_an_engine_is_not_installed_over_other_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text(json.dumps("mine"))

    assert execute(["engine", "install", str(tmp_path)]) == 2

    assert "could not be installed" in capfd.readouterr().err
    assert (tmp_path / "notes").exists()
