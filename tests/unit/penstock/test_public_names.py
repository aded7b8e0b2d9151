"""What is installed: public names, types, and a user's own files of the names that penstock's packages have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[3]
PARTS = ("console", "producer", "workers", "buffer", "consumers")
PUBLIC = [
    "AllSamplesHook", "Batch", "CompletedGroup", "Config", "ConfigError", "ConversationEnvironment",
    "ConversationFull", "ConvertHook", "DataEnded",
    "EngineMetrics", "Environment", "EvalLogHook", "GenerateHook", "Job", "Judge", "JudgeError", "Judges",
    "Observation", "OwnershipLost", "PenstockError", "PostprocessHook", "Receiver", "Request", "Requests",
    "RewardsHook", "RolesApart", "RolloutDataset", "RolloutHook", "RolloutLogHook", "RolloutManager", "RowSource",
    "Sample", "SampleHook", "SampleRow", "SamplesHook", "Score", "ScoreError", "Scorer", "Sender", "Shards",
    "ToolEnvironment", "Trackers", "Trainer", "TrlRollouts", "WaitTimeout", "WeightsNotFinite", "__version__",
    "concatenated", "score",
]  # fmt: skip


def script(folder: Path, text: str, name: str = "train.py") -> subprocess.CompletedProcess[str]:
    """Run a user's script beside their files; its folder is first on the path, as Python has it."""
    (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_public_names_are_these_and_a_shell_completes_them() -> None:
    assert sorted(penstock.__all__) == sorted(PUBLIC)
    assert {*PUBLIC, "VerlRollout"} == {name for name in dir(penstock) if not name.startswith("_")} | {"__version__"}
    for name in PUBLIC:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        penstock.Trianer  # noqa: B018


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

    assert (done.returncode, done.stdout, done.stderr) == (0, "penstock.consumers.trainer\n", "")


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


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_imported_under_one_name_alone(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {part}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    said = f"ImportError: Import penstock.{part}: the package {part} is part of penstock."
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)


@pytest.mark.parametrize("part", PARTS)
def test_a_module_of_the_users_own_may_have_the_name_of_a_part(tmp_path: Path, part: str) -> None:
    (tmp_path / f"{part}.py").write_text("class Own: pass")

    done = script(tmp_path, f"import penstock.{part}\nfrom {part} import Own\nprint(Own.__module__)")

    assert (done.returncode, done.stdout) == (0, f"{part}\n"), done.stderr
