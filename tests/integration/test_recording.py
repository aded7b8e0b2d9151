"""A run recorded by a rollout-only trainer, then trained by itself: no engines, no buffer, no Redis."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.console.launch import preflight
from penstock.consumers.grpo.loop import make_loop
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.parts import PATIENCE_S, Player, admit, buffering, jobs_of, make_config, until
from tests.tiny_model import make_tiny_model

STEPS = 3


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    model = make_tiny_model(tmp_path / "tiny")
    trainer = {"batch_groups": 2, "steps": STEPS, "checkpoint_every": 2, "lr": 0.01, "num_threads": 1}
    return make_config(
        redis_server.url,
        keys.run,
        tmp_path,
        model={"path": str(model)},
        staleness={"mode": "async", "bound": 20},
        trainer=trainer,
        debug={"save_batches": str(tmp_path / "batches" / "{rollout_id}.bin"), "rollout_only": True},
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_rollout_only_run_is_recorded_and_then_trained_by_itself(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with buffering(config):
        loop = make_loop(config, 0, 1)
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(loop.run()), daemon=True)
        thread.start()
        until(lambda: client.hget(keys.clock, "version:policy") == b"1", timeout_s=60)
        admit(client, keys, 2 * STEPS)
        Player(client, keys).work(2 * STEPS, 1)
        thread.join(2 * PATIENCE_S)
        assert done == [0]
    published = [Publication.from_bytes(entry[b"p"]) for _, entry in client.xrange(keys.weights("policy"))]
    assert [one.version for one in published] == [1, 2, 3, 4]
    assert len({one.path for one in published}) == 1, "nothing was trained: the same weights under every version"
    assert not any("loss" in row for row in steps_of(config.run_dir))
    recorded = [jobs_of(batch) for batch in Trainer.replay(str(config.debug.save_batches))]
    assert recorded == [[f"d/0/{2 * i}", f"d/0/{2 * i + 1}"] for i in range(STEPS)]

    alone = config.model_dump(mode="json")
    alone |= {"run": "alone", "redis": {}, "debug": {"load_batches": config.debug.save_batches}}
    path = tmp_path / "alone.yaml"
    path.write_text(json.dumps(alone))
    command = [sys.executable, "-m", "penstock.cli", "trainer", "--config", str(path), "--trainer.steps=10"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    assert "ends with batch 3" in found.stderr
    rows = steps_of(config.directory / "alone")
    assert [(row["batch"], row["skipped"]) for row in rows] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_recording_is_not_for_a_whole_run(config: Config) -> None:
    alone = config.model_copy(update={"debug": config.debug.model_copy(update={"load_batches": "{rollout_id}.bin"})})
    with pytest.raises(ConfigError, match="use `penstock trainer`, or remove the key"):
        preflight.check(alone)
    with pytest.raises(ValueError, match="remove the other keys"):
        type(config.debug)(load_batches="{rollout_id}", rollout_only=True)
