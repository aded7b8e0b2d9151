"""The command line: exit codes, one sentence on stderr, no traceback, nothing heavy imported before its time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import cli
from penstock.errors import ConfigError, PayloadError, QueueUnavailable

YAML = "run: demo\nmodel: {path: m}\ndata: {train: [{name: t, path: t.jsonl}]}\n"


def penstock(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(cli.__file__).resolve().parent.parent
    environ = {**os.environ, "PYTHONPATH": str(root), **env}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)

    done = penstock("run", "run.yaml", "--worker.slot=3", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr == (
        "penstock: worker.slot (the argument --worker.slot): there is no such key; did you mean worker.slots?\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.parametrize("file", ["buffer.py", "buffer/__init__.py"])
def test_another_projects_buffer_is_refused_by_name(tmp_path: Path, file: str) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise SystemExit('imported')")

    done = penstock("buffer", "--config", "run.yaml", cwd=tmp_path)

    assert done.returncode == 2
    assert f"The name buffer leads to {tmp_path / file}, which is not penstock's" in done.stderr


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom penstock import cli\n"
        "try: cli.main(['run', '--help'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'redis', 'matplotlib', 'transformers', 'penstock.config'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), file=sys.stderr)"
    )
    root = Path(cli.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "--resume" in done.stdout
    assert "heavy []" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("Say this."), 2),
        (QueueUnavailable("No Redis at redis://:hush@h."), 2),
        (PayloadError("Say this."), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "_register_inspection", lambda: None)

    assert cli._run([]) == code
    said = capsys.readouterr().err
    assert "hush" not in said
    assert said.count("\n") == (0 if code == 130 else 1)


def test_resume_and_fresh_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)

    done = penstock("run", "run.yaml", "--resume", "--fresh", cwd=tmp_path)

    assert (done.returncode, "give one of them" in done.stderr) == (2, True)
