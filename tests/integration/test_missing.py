"""An environment that is missing is a skip with its name for a developer, and a failure in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {
    "PENSTOCK_ENGINE_PYTHON": "tests/integration/test_engine_lifetime.py",
    "PENSTOCK_ADAPTERS_PYTHON": "tests/wide/test_foreign_trainers.py",
}


@pytest.mark.parametrize(
    ("variable", "ci", "code"),
    [
        ("PENSTOCK_ENGINE_PYTHON", "true", 1),
        ("PENSTOCK_ADAPTERS_PYTHON", "true", 1),
        ("PENSTOCK_ADAPTERS_PYTHON", "", 0),
    ],
)
def test_ci_fails_without_an_environment(variable: str, ci: str, code: int) -> None:
    environment = {**os.environ, "CI": ci, variable: "/none/bin/python"}
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", TESTS[variable]]
    ended = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "/none/bin/python is missing: run make" in ended.stdout
    assert ended.returncode == code, ended.stdout[-2000:]
