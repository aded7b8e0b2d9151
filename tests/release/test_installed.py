"""The wheel, installed: what a user's script and their type checker see of it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("console", "penstock", "producer", "workers", "buffer", "consumers")
#: console/first_run links to files of an example.
COPIED = (*PACKAGES, "examples", "pyproject.toml", "README.md", "LICENSE")

SCRIPT = """
from penstock import Environment, Observation, Requests, Trainer

with Trainer(run="digits") as trainer:
    reveal_type(trainer)
    for batch in trainer:
        trainer.comit(batch)
"""


def build_wheel(folder: Path) -> Path:
    """Penstock's wheel, made in ``folder``."""
    source = folder / "source"
    source.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "./source"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    (wheel,) = (folder / "dist").glob("penstock-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and what penstock needs from ours."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=folder, check=True, timeout=120)
    (site,) = (folder / "venv").glob("lib/python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "python"


def test_the_wheel_has_all_that_is_no_code(installed: Path) -> None:
    (site,) = installed.parents[1].glob("lib/python3*/site-packages")

    assert (site / "penstock" / "py.typed").is_file()
    lua = {path.name for path in (ROOT / "penstock" / "protocol" / "lua").glob("*.lua")}
    assert "lease.lua" in lua
    assert {path.name for path in (site / "penstock" / "protocol" / "lua").glob("*.lua")} == lua
    assert (site / "penstock" / "workers" / "engine_env" / "install.sh").is_file()
    first = site / "penstock" / "console" / "first_run"
    assert {path.name for path in first.glob("*.*")} >= {"cpu.yaml", "cuda.yaml", "digits.py", "reward.py"}


def test_the_wheel_has_one_top_level_package(installed: Path) -> None:
    (wheel,) = (installed.parents[2] / "dist").glob("penstock-*.whl")

    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {name for name in names if not name.endswith(".dist-info")} == {"penstock"}


def test_the_wheel_has_the_version_of_the_changelog(installed: Path) -> None:
    found = re.search(r"^## \[(\d[^]]*)]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert found is not None
    (wheel,) = (installed.parents[2] / "dist").glob("penstock-*.whl")
    assert wheel.name.split("-")[1] == found[1]


def test_a_type_checker_outside_the_repository_knows_the_public_names(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed), "train.py"]

    said = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False).stdout

    assert 'Revealed type is "penstock.consumers.trainer.Trainer"' in said, said
    assert '"Trainer" has no attribute "comit"; maybe "commit"?' in said, said
    assert "Found 1 error" in said, said


def test_an_installed_penstock_runs_beside_files_of_its_names(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "buffer.py").write_text("raise SystemExit('imported')")
    (tmp_path / "train.py").write_text("from penstock import Environment, Trainer\nprint(Trainer.__module__)")

    done = subprocess.run(
        [installed, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stdout) == (0, "penstock.consumers.trainer\n"), done.stderr
