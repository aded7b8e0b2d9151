"""What is not installed is named with its extra, and the floor, the buffer, the producer and the console need none."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.errors import ConfigError
from penstock.system.extras import EXTRAS, check_installed, needed

ROOT = Path(__file__).parents[4]
#: Imported as another name than it is installed by.
NAMES = {
    "PIL": "pillow",
    "math_verify": "math-verify",
    "if_verifiable": "if-verifiable",
    "openenv": "openenv-core",
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "reasoning_gym": "reasoning-gym",
}

BLOCKED = f"""
import sys
for package in {sorted(EXTRAS)!r}:
    sys.modules[package] = None
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where no extra is installed."""
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)


def test_each_package_is_in_the_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        brought = {Requirement(one).name for one in project["optional-dependencies"][extra]}
        assert NAMES.get(package, package) in brought


def test_all_has_every_extra_but_one_of_several_trackers_and_environments_of_others() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    apart = {"all", "dev", "bench", "trackio", "wandb", "mcp", "openenv", "reasoning-gym", "verifiers"}
    assert everything.extras == extras.keys() - apart


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("torch", "this test")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"^this test needs torch, .*: pip install 'penstock\[trainer\]'\.$"):
        check_installed("torch", "this test")
    assert needed("other.part") == "other, which is not installed here: pip install other."


@pytest.mark.parametrize("package", ["aiohttp", "torch"])
def test_what_publishing_lacks_is_installed_with_the_trainers_extra(package: str) -> None:
    """Workers need aiohttp, too, but their extra lacks what the trainer needs next."""
    code = f"""
import sys
sys.modules[{package!r}] = None
from penstock.consumers.session import Session
session = Session.__new__(Session)
session._publisher = None
session.publisher
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    wanted = f"Publishing weights needs {package}, which is not installed here: pip install 'penstock[trainer]'."
    assert wanted in done.stderr


def test_queue_buffer_producer_and_console_need_no_extra() -> None:
    parts = "penstock.buffer.main, penstock.producer.main, penstock.redis.server, penstock.console.launch.run"
    done = run(f"import {parts}, penstock.console.cli.main, penstock; penstock.Config, penstock.Job")
    assert done.returncode == 0, done.stderr


def test_a_name_of_the_facade_names_the_extra() -> None:
    done = run("from penstock import RolloutDataset")
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: penstock.RolloutDataset needs torch, which is not installed here: "
        "pip install 'penstock[trainer]'."
    )


def test_a_part_on_the_command_line_names_the_extra_in_one_line() -> None:
    done = run("""
import penstock.console.cli.main as cli
cli.app = lambda *_, **__: __import__("torch")
cli.main([])
""")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "penstock: this part needs torch, which is not installed here: pip install 'penstock[trainer]'.\n"
    )
