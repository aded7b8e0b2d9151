"""A test that fails over text which cannot be encoded is named by a run of several processes."""

import re
import subprocess
import sys
from pathlib import Path

HOSTILE = """
import logging

def test_that_writes():
    logging.error("\\ud800")

def test_that_fails():
    assert "\\ud800" == ""
"""


def test_reports_of_hostile_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "test_hostile.py").write_text(HOSTILE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "-p",
        "tests.plain_reports",
        f"--rootdir={tmp_path}",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert "INTERNALERROR" not in done.stdout
    assert re.search(r"^FAILED .*test_hostile\.py::test_that_fails", done.stdout, re.MULTILINE)
    assert "1 failed, 1 passed" in done.stdout
