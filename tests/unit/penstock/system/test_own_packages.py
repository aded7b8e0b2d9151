"""What is installed: public names, types, and a user's own files of the names that penstock's packages have."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.system import own_packages
from penstock.system.own_packages import HOME, NAMES

PUBLIC = [
    "AllSamplesHook", "Batch", "CompletedGroup", "Config", "ConfigError", "ConvertHook", "DataEnded",
    "EngineMetrics", "Environment", "EvalLogHook", "GenerateHook", "Job", "Judge", "JudgeError", "Judges",
    "Observation", "OwnershipLost", "PenstockError", "PostprocessHook", "Receiver", "Request", "Requests",
    "RewardsHook", "RolesApart", "RolloutDataset", "RolloutHook", "RolloutLogHook", "RolloutManager", "RowSource",
    "Sample", "SampleHook", "SampleRow", "SamplesHook", "Score", "Scorer", "Sender", "Shards", "Trackers", "Trainer",
    "TrlRollouts", "WaitTimeout", "__version__", "concatenated", "score",
]  # fmt: skip


def script(folder: Path, text: str, name: str = "train.py") -> subprocess.CompletedProcess[str]:
    """Run a user's script beside their files; its folder is first on the path, as Python has it."""
    (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1]


def test_public_names_are_these_and_a_shell_completes_them() -> None:
    assert sorted(penstock.__all__) == sorted(PUBLIC)
    assert {*PUBLIC, "VerlRollout"} == {name for name in dir(penstock) if not name.startswith("_")} | {"__version__"}
    for name in PUBLIC:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        penstock.Trianer  # noqa: B018


def test_every_package_is_typed() -> None:
    for name in ("penstock", *NAMES):
        assert (HOME / name / "py.typed").is_file(), name


def occupy(folder: Path) -> None:
    """Files of the user's own under all names; none of them may be imported."""
    for name in ("workers", "console", "consumers"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('imported')")
    for name in ("buffer", "producer"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")


def test_a_script_that_imports_only_penstock_runs_beside_files_of_our_names(tmp_path: Path) -> None:
    occupy(tmp_path)

    done = script(tmp_path, "from penstock import Environment, Requests, Trainer\nprint(Trainer.__module__)")

    assert (done.returncode, done.stdout, done.stderr) == (0, "consumers.trainer\n", "")


def test_the_command_line_runs_beside_files_of_our_names(tmp_path: Path) -> None:
    occupy(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "run: demo\nmodel: {path: .}\ndata: {train: [{name: t, path: t.jsonl}]}\nengine: {args: {device: cpu}}\n"
    )
    (tmp_path / "t.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    (tmp_path / "config.json").write_text("{}")

    done = script(
        tmp_path,
        "from penstock.cli import main\n"
        "main(['run', 'run.yaml', '--engine.python=/bin/sh', '--redis=redis://127.0.0.1:1/0'])",
    )

    assert done.returncode == 2
    assert done.stderr.startswith("penstock: No Redis answers at ")


def test_their_module_is_theirs_while_ours_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "buffer.py").write_text("class Replay: pass\n")

    done = script(tmp_path, "from penstock import Trainer\nfrom buffer import Replay\nprint(Replay.__module__)")

    assert (done.returncode, done.stdout) == (0, "buffer\n"), done.stderr


@pytest.mark.parametrize("package", [True, False])
def test_theirs_that_comes_first_is_named_with_a_remedy_when_ours_is_needed(tmp_path: Path, package: bool) -> None:
    theirs = tmp_path / ("consumers/__init__.py" if package else "consumers.py")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("")

    done = script(tmp_path, "import consumers\nfrom penstock import Trainer")

    assert last_line(done) == (
        f"ImportError: penstock needs its package 'consumers' ({HOME / 'consumers'}), and {theirs} was imported under "
        "that name before: rename yours, or import it from a package of your own (yours.consumers)."
    )


@pytest.mark.parametrize(
    "statement", ["from workers.pool import Pool", "from workers import Pool", "import workers; workers.Pool()"]
)
@pytest.mark.parametrize("namespace", [True, False])
def test_theirs_that_comes_after_ours_is_named_with_a_remedy(tmp_path: Path, statement: str, namespace: bool) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "pool.py").write_text("class Pool: pass")
    if not namespace:
        (tmp_path / "workers" / "__init__.py").write_text("class Pool: pass")

    done = script(tmp_path, f"from penstock import Environment\nEnvironment\n{statement}")

    theirs = tmp_path / "workers" / ("" if namespace else "__init__.py")
    assert last_line(done) == (
        f"ImportError: {str(theirs).rstrip('/')} cannot be imported as 'workers', which is the name of a package of "
        f"penstock that is loaded ({HOME / 'workers'}): rename yours, or import it from a package of your own "
        "(yours.workers)."
    )


def test_a_name_that_nobody_has_is_an_ordinary_mistake(tmp_path: Path) -> None:
    done = script(tmp_path, "import workers.jobs.environments\nimport workers\nworkers.nothing")
    assert last_line(done) == "AttributeError: module 'workers' has no attribute 'nothing'"
    done = script(tmp_path, "import penstock, workers.nothing")
    assert last_line(done) == "ModuleNotFoundError: No module named 'workers.nothing'"


def test_the_docs_name_all_packages_that_are_installed() -> None:
    said = (
        (HOME / "docs" / "operations.md").read_text().partition("## Beside files of your own")[2].partition("\n## ")[0]
    )
    numbers = {4: "four", 5: "five", 6: "six"}
    assert f"installs {numbers[len(NAMES)]} more packages" in said
    for text in (said, own_packages.__doc__ or ""):
        assert set(re.findall(r"`(\w+)`", text)) >= NAMES
