"""What a test needs and this machine may lack: a developer's run skips it by name, CI fails."""

import os
import shutil

import pytest


def need(program: str, target: str) -> None:
    """Skip, or fail in CI, where ``program`` is not there; ``make target`` brings it."""
    if shutil.which(program) is not None:
        return
    lacking = f"{program} is missing: run make {target}"
    if os.environ.get("CI"):
        pytest.fail(lacking)
    pytest.skip(lacking)
