"""What a test needs and this machine may lack: a developer's run skips it by name, CI fails.

What CI cannot have either, a GPU or the source of another project, is skipped where it is wanted, by that name.
"""

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.workers.rewards.jail.detect import check_jail


def need(program: str, target: str = "") -> None:
    """Skip, or fail in CI, where ``program`` is not there; ``make target`` brings it, or nothing of ours does."""
    if shutil.which(program) is not None:
        return
    lack(f"{program} is missing: {f'run make {target}' if target else 'install it'}")


def module(name: str) -> Any:
    """Import ``name``, of an extra that ``make setup`` brings; skip, or fail in CI, where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        lack(f"{name} is missing ({exc}): run make setup")


def need_jail() -> None:
    """Skip, or fail in CI, where no jail holds: for root, the interpreter of tests may be readable by root alone."""
    try:
        check_jail(RewardConfig())
    except ConfigError as exc:
        lack(f"{exc} Or run make bubblewrap.")


def lack(lacking: str) -> NoReturn:
    """Skip, or fail in CI, for what CI has; ``lacking`` says what is not there."""
    if os.environ.get("CI"):
        pytest.fail(lacking)
    pytest.skip(lacking, allow_module_level=True)
