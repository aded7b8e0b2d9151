"""What an example says at its end, and that `make examples` runs each of them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from penstock.config.load import load_config
from penstock.config.staleness import Mode
from tests.unit.example_parts import EXAMPLES, load

ROOT = Path(__file__).parents[2]
#: They need GPUs to learn: a model of 1.5B parameters and its data, and one of 135M.
NOT_SMALL = {"gsm8k", "instruct"}


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    return load("measure.py")


@pytest.mark.parametrize(("last", "moved"), [(0.75, True), (0.25, False), (None, False)])
@pytest.mark.parametrize("name", ["judge", "steps"])
def test_a_summary_ends_in_what_was_measured(
    measure: ModuleType, tmp_path: Path, name: str, last: float | None, moved: bool
) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"run": name, "accuracy_first": 0.25, "accuracy_last": last}))
    path.with_name("eval.jsonl").write_text("")
    assert measure.measured(name, path) is moved
    summary = json.loads(path.read_text())
    assert summary["run"] == name
    found = {key: summary[key] for key in ("measure", "first", "last", "direction")}
    assert found == {"measure": measure.MEASURES[name], "first": 0.25, "last": last, "direction": "up"}


@pytest.mark.parametrize(("last", "moved"), [(0.5, True), (0.125, False)])
def test_every_held_out_data_set_has_to_move(measure: ModuleType, tmp_path: Path, last: float, moved: bool) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"run": "tools", "accuracy_first": 0.25, "accuracy_last": 0.75}))
    scores = [("calculator", 0.25), ("game", 0.125), ("game", 0.875), ("calculator", 0.75), ("game", last)]
    rows = (json.dumps({"dataset": dataset, "accuracy": accuracy}) for dataset, accuracy in scores)
    path.with_name("eval.jsonl").write_text("\n".join(rows))
    assert measure.measured("tools", path) is moved


@pytest.mark.parametrize("name", ["", "digit", "../tests"])
def test_a_name_that_is_no_example_is_said_and_removes_nothing(tmp_path: Path, name: str) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "runs" / "digit").mkdir(parents=True)

    done = subprocess.run(
        ["examples/run.sh", *([name] if name else [])], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 2
    assert f"'{name}' is no example: name one of " in done.stderr
    assert " judge/ " in done.stderr
    assert (tmp_path / "runs" / "digit").exists()


def test_make_examples_runs_all_of_them(measure: ModuleType) -> None:
    folders = {path.parent.name for path in ROOT.glob("examples/*/run.yaml")} - NOT_SMALL
    (line,) = re.findall(r"^EXAMPLES = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(line.split()) == folders
    # Several trainers say by themselves what became of each; test_several.py holds them to it.
    assert measure.MEASURES.keys() == folders - {"several"}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml")))
def test_an_example_runs_in_every_mode(name: str, mode: Mode) -> None:
    """As the first of them says at its head: any key can be overridden, such as this one."""
    assert load_config(EXAMPLES / name, [f"--staleness.mode={mode}"], environ={}).staleness.mode is mode


def test_a_picture_shows_reward_and_scores_by_step(tmp_path: Path) -> None:
    picture = load("picture.py")
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "reward_mean": 0.25}\n{"step": 2, "reward_mean": 0.5}\n')
    (tmp_path / "eval.jsonl").write_text('{"dataset": "heldout", "version": 1, "accuracy": 0.25}\n')

    picture.draw(tmp_path, tmp_path / "run.png")

    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert picture.scores_of(tmp_path) == {"heldout": [(1, 0.25)]}
