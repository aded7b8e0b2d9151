"""An optimizer step inside verl and inside TRL, each a real process in its own environment, on a real SGLang server."""

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
from penstock.protocol.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import buffering, until
from tests.integration.worker_play import make_config
from tests.missing import need

PYTHON = os.environ.get("PENSTOCK_ADAPTERS_PYTHON", ".adapters/bin/python")
#: Longest run of one process; imports alone take 15 s on a busy machine.
PROCESS_S = 240

pytestmark = [pytest.mark.engine, pytest.mark.timeout(PROCESS_S + 60)]


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


def run_inside(module: str, config: Config, client: redis.Redis, keys: Keys, folder: Path, groups: int) -> Any:
    """Run a module in the adapters' environment beside a buffer and a worker until ``groups`` are retired.

    Returns what it wrote.
    """
    settings, out = folder / "config.json", folder / "out.json"
    settings.write_text(config.model_dump_json())
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", module, str(settings), str(out)]
    with buffering(config), working(config, folder):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        until(lambda: play.counter(client, keys, "retired") >= groups, "groups to retire")
        assert play.counter(client, keys, "retired") == play.counter(client, keys, "admitted") == groups
    assert audit(client, keys).ok
    return json.loads(out.read_text())


def test_verl_takes_a_step_on_generated_sequences_and_draws_from_the_new_weights(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    found = run_inside("tests.adapters.verl_step", config, client, keys, tmp_path, groups=10)
    first, second = found["first"], found["second"]
    assert first["shapes"] == {
        "prompts": [9, 6], "responses": [9, 12], "response_mask": [9, 12], "rollout_log_probs": [9, 12],
        "rollout_versions": [9, 12], "rm_scores": [9, 12], "input_ids": [9, 18], "attention_mask": [9, 18],
        "position_ids": [9, 18], "old_log_probs": [9, 12], "advantages": [9, 12],
    }  # fmt: skip
    assert first["prompts"][::3] == [[0, 0, 0, 2, 3, 4], [0, 5, 6, 7, 8, 9], [0, 0, 0, 0, 12, 13]]
    assert first["uid"] == [f"u0-{i}" for i in range(3) for _ in range(3)]
    assert first["positions_as_verl"]
    assert first["rewards"] == [total % 10 for total in first["sums"]], "rm_scores are what the run's reward gave"
    # T6: verl's own pass over its own padding, at the temperature it was handed, gives what the engine drew with.
    assert first["difference"] < 2e-3
    assert found["temperature"] == 0.8
    assert "meta_info names temperature 1, but this VerlRollout draws at 0.8" in found["named"]
    assert found["fed"]["temperature"] == 0.7
    assert "drawn at temperature 0.7, but actor_rollout_ref.rollout.temperature is 1" in found["fed"]["other"]
    assert "temperature" in found["fed"]["union"], "verl itself sees that its loop names another one"
    assert first["versions"] == [1]
    # compute_log_prob: the engine scores what it drew as it drew it.
    assert found["scored"]["shape"] == [9, 12]
    assert found["scored"]["versions"] == [1]
    assert found["scored"]["difference"] < 2e-3
    assert found["metrics"]["grad_norm"] > 0
    assert found["moved"] > 0.1
    # The second rollout is of the weights that the step made: they were far from the first ones.
    assert found["version"] == 2
    assert second["versions"] == [2]
    assert second["difference"] < 2e-3
    greedy = found["greedy"]
    assert greedy[0] == greedy[1] == greedy[2]


def test_trl_trains_two_steps_by_its_rollout_func(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    found = run_inside("tests.adapters.trl_step", config, client, keys, tmp_path, groups=6)
    assert found["steps"] == 2
    assert [set(call["penstock_version"]) for call in found["calls"]] == [{1}, {2}], "published before each rollout"
    for call in found["calls"]:
        assert len(call["prompts"]) == 12
        # T6: of the weights that TRL holds at that step.
        assert call["difference"] < 2e-3
    rewards = [sum(call["penstock_reward"]) / 12 for call in found["calls"]]
    logged = [entry["reward"] for entry in found["log"] if "reward" in entry]
    assert logged == pytest.approx(rewards, rel=1e-3)
    assert found["moved"] > 1e-3
