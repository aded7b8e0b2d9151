"""Folder first, and a trainer that stands still (SIGSTOP) while it publishes, is taken over, and goes on.

Its number names one folder, its successor's is not touched, nor what its successor sends.
"""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file

from penstock.config import Config
from penstock.consumers.clock import versions_in
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights import write as files
from penstock.consumers.weights.claim import claimed
from penstock.errors import DiskFull
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.system import disk
from penstock.weights.index import read_index
from tests.integration.folder_trainer import POINTS
from tests.integration.parts import PATIENCE_S, make_config, publish, until
from tests.integration.test_send_first import newest
from tests.integration.test_send_first_zombies import is_stopped


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path, trainer={"transport": "gloo"})


@pytest.mark.parametrize("point", POINTS)
def test_T1_T16_a_trainer_that_comes_back_leaves_the_folder_of_its_successor_as_it_is(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path, point: str
) -> None:
    (tmp_path / "run.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.integration.folder_trainer", str(tmp_path / "run.json"), point]
    zombie = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: is_stopped(zombie.pid))
        client.delete(keys.owner("actor"))
        with Trainer(config) as successor:
            version = publish(successor, 5)
            assert version == (2 if point == "claimed" else 1)
            client.hset(keys.transfer("policy"), mapping={"id": f"{version}-0", "st": "open"})
            zombie.send_signal(signal.SIGCONT)
            said, _ = zombie.communicate(timeout=PATIENCE_S)
            assert "another trainer" in said
            whole = newest(client, keys)
            assert whole.version == version
            read_index(Path(whole.path), whole.index)
            assert float(load_file(Path(whole.path) / "model.safetensors")["weight"]) == 5.0
            assert client.hget(keys.transfer("policy"), "id") == whole.id.encode(), "nor what is sent"
            assert list(successor.weights_dir.glob(".*")) == []
    finally:
        zombie.kill()
        zombie.wait()


def test_a_disk_that_is_full_behind_the_claim_costs_no_number(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fails = files._delete_old, [DiskFull("the folder is full.")]

    def full_once(*args: Any) -> None:
        if fails:
            raise fails.pop()
        real(*args)

    monkeypatch.setattr(files, "_delete_old", full_once)
    monkeypatch.setattr(disk, "LOOK_S", 0.0)
    with Trainer(config) as trainer:
        assert publish(trainer, 5) == 1
        assert versions_in(trainer.weights_dir) == [1]
        assert claimed(trainer.weights_dir) == 1
