"""Modules that run in the environment of verl and TRL (.adapters), beside a worker, a buffer and an engine."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.config.load import save_resolved
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import buffering, until
from tests.integration.worker_play import make_config
from tests.missing import need

PYTHON = os.environ.get("PENSTOCK_ADAPTERS_PYTHON", ".adapters/bin/python")
#: Longest run of one process; imports alone take 15 s on a busy machine.
PROCESS_S = 240


@pytest.fixture(scope="session", autouse=True)
def _adapters() -> None:
    """Looked for before an engine is started for nothing."""
    need(PYTHON, "adapters")


@pytest.fixture
def config(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, model_config: ModelConfig, engine_url: str,
    tmp_path: Path,
) -> Config:  # fmt: skip
    engine = {"url": engine_url, "health_timeout_s": 20.0}
    reward = {"function": "tests.adapters.rewards:last_digit"}
    return make_config(redis_server.url, keys, model_config, tmp_path, engine=engine, reward=reward)


@contextlib.contextmanager
def working(config: Config, folder: Path) -> Iterator[None]:
    """A worker process; how it ends is not the subject here."""
    save_resolved(config, folder / "run.yaml")
    command = [sys.executable, "-m", "penstock.cli", "worker", "--config", str(folder / "run.yaml"), "--name", "w"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
        assert process.poll() is None, (folder / "worker.log").read_text()[-4000:]
    finally:
        process.kill()
        process.wait()


def run_inside(
    module: str, config: Config, client: redis.Redis, keys: Keys, folder: Path, groups: int, *beside: str
) -> Any:
    """Run a module in the adapters' environment beside a buffer and a worker until ``groups`` are retired.

    Args:
        beside: folders of packages, further to those of the environment.

    Returns what it wrote.
    """
    settings, out = folder / "config.json", folder / "out.json"
    settings.write_text(config.model_dump_json())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *beside]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [PYTHON, "-m", module, str(settings), str(out)]
    with buffering(config), working(config, folder):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        until(lambda: play.counter(client, keys, "retired") >= groups, "groups to retire")
        assert play.counter(client, keys, "retired") == play.counter(client, keys, "admitted") == groups
    assert audit(client, keys).ok
    return json.loads(out.read_text())
