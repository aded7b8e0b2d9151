"""What a test needs and this machine may lack: a developer's run skips it by name, CI fails."""

import os
import shutil

import pytest


def need(program: str, target: str = "") -> None:
    """Skip, or fail in CI, where ``program`` is not there; ``make target`` brings it, or nothing of ours does."""
    if shutil.which(program) is not None:
        return
    lacking = f"{program} is missing: {f'run make {target}' if target else 'install it'}"
    if os.environ.get("CI"):
        pytest.fail(lacking)
    pytest.skip(lacking)
