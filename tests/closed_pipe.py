"""A program whose reader has left."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_without_a_reader(arguments: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run this Python with ``arguments`` in ``folder``, its stdout a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    return done
