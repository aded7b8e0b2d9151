"""kill -9 of the real buffer process at every step of a group's way: a successor goes on, once and with all of it."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from consumers.trainer import Trainer
from penstock.config import Config
from penstock.protocol.audit import audit
from penstock.protocol.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    jobs_of,
    make_config,
    publish,
    step,
    until,
)


def spawn(config: Config, folder: Path, *point: str) -> "subprocess.Popen[bytes]":
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.integration.buffer_driver", str(path), *point]
    return subprocess.Popen(command, start_new_session=True)


@pytest.mark.parametrize("sampler", ["oldest_version", "difficulty"])
@pytest.mark.parametrize(
    "point",
    [
        "before persist",  # completed, and their payloads still have a time to live
        "before keep",  # permanent, and nobody may cut them
        "after cut",  # cut, and the reply never came
        "after seal",  # sealed, and their payloads are still there
        "before sweep",  # payloads freed, groups still there
    ],
)
def test_I4_I5_a_buffer_killed_at_any_step_is_succeeded(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, point: str, sampler: str
) -> None:
    staleness, taken = {"mode": "async", "bound": 8}, {"subscription": {"sampler": sampler}}
    sections: dict[str, Any] = {"staleness": staleness, "buffer": {"lease_s": 0.5}, "trainer": taken}
    config = make_config(redis_server.url, keys.run, tmp_path, **sections)
    trained: list[str] = []
    with Trainer(config, prefetch=1) as trainer:
        publish(trainer)
        admit(client, keys, 8)
        Player(client, keys).work(6, 1)
        victim = spawn(config, tmp_path, *point.split())
        try:
            if "seal" in point or "sweep" in point:
                trained += jobs_of(step(trainer))
                trainer.state_dict()
                trainer.checkpointed()
            else:
                trainer.next_nowait()
            assert victim.wait(PATIENCE_S) == -signal.SIGKILL, "killed at the point"
        finally:
            victim.kill()
            victim.wait()
        with buffering(config):
            Player(client, keys).work(2, 1)
            while len(trained) < 8:
                trained += jobs_of(step(trainer))
            trainer.state_dict()
            trainer.checkpointed()
            until(lambda: play.counter(client, keys, "swept") == 8)
    assert sorted(trained) == [f"d/0/{i}" for i in range(8)]
    assert client.keys(keys.of("payload:*").replace("{", "[{]")) == []
    assert (play.counter(client, keys, "cut"), play.counter(client, keys, "payload_lost")) == (4, 0)
    assert audit(client, keys).ok
