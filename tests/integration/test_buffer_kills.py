"""kill -9 of the real buffer process at every step of a group's way: a successor goes on, once and with all of it."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock import payloads
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.payloads import sides
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.records.keys import Keys
from penstock.records.sample import Sample
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

#: Side arrays that every group shares.
SHARED = {name: sides.packed(name, np.full((2, 3), at, np.float32), "d/0/0/0") for at, name in enumerate("ab")}


class Showing(Player):
    """Its groups share side arrays, as the images of a prompt."""

    def commit(self, held: RawLease, samples: Sequence[Sample], version: int, **_: Any) -> scripts.Committed:
        entries = [one.entry(name) for name, one in SHARED.items()]
        records = []
        for sample in samples:
            data, (meta,) = payloads.pack([sample], token=held.token, server="control")
            meta.sides = entries
            pairs = [(self.keys.payload(sample.id, held.token), data)]
            pairs += [(sides.key_of(self.keys, held.job, sample.k, held.token, e), SHARED[e[0]].data) for e in entries]
            for key, value in pairs:
                self.client.set(key, value, nx=True, ex=600)
            records.append((sample.k, version, meta.to_bytes()))
        return run(self.client, scripts.commit(self.keys, held.job, held.token, records))


def trained_of(batch: Any) -> list[str]:
    """Jobs of a batch, whose samples all have what their groups share."""
    for name, one in SHARED.items():
        wanted = sides.unpack(name, one.data, "d/0/0/0", one.checksum)
        assert all(np.array_equal(found, wanted) for found in batch.side(name))
    return jobs_of(batch)


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
        Showing(client, keys).work(6, 1)
        victim = spawn(config, tmp_path, *point.split())
        try:
            if "seal" in point or "sweep" in point:
                trained += trained_of(step(trainer))
                trainer.state_dict()
                trainer.checkpointed()
            else:
                trainer.next_nowait()
            assert victim.wait(PATIENCE_S) == -signal.SIGKILL, "killed at the point"
        finally:
            victim.kill()
            victim.wait()
        with buffering(config):
            Showing(client, keys).work(2, 1)
            while len(trained) < 8:
                trained += trained_of(step(trainer))
            trainer.state_dict()
            trainer.checkpointed()
            until(lambda: play.counter(client, keys, "swept") == 8)
    assert sorted(trained) == [f"d/0/{i}" for i in range(8)]
    for kind in ("payload", "side"):
        assert client.keys(keys.of(f"{kind}:*").replace("{", "[{]")) == []
    assert (play.counter(client, keys, "cut"), play.counter(client, keys, "payload_lost")) == (4, 0)
    assert audit(client, keys).ok
