"""A Redis at maxmemory: whatever is killed and started again meanwhile, what is there is trained and freed."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import ensure_lanes, run
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import until
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import rig, server

__all__ = ["parts", "server"]


@pytest.mark.timeout(600)
def test_I4_a_full_redis_drains_through_a_restart_of_every_part(
    server: RedisServer, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    with rig(server, parts, model_config, publications[1], tmp_path) as run_:
        buffer, producer, worker = (parts.start(name, run_.config) for name in ("buffer", "producer", "worker"))
        with Trainer(run_.config) as trainer:
            run_.publish(trainer)
            run_.train(trainer)
            run_.until("completed", 10)
        # Beyond the gate, which may have nothing left to draw by now; the worker finds them when it is there again.
        worker.freeze()
        play.admit(
            run_.client, run_.keys, [Job(f"d/9/{i}", 2, prompt=f"a{i}=", label="x") for i in range(4)], source="ours"
        )
        run_.client.config_set("maxmemory", 1)
        for part in (buffer, producer, worker):
            part.restart()
        buffer.until_says("leading in epoch")
        producer.until_says("prompts: ")
        worker.until_says("buffering samples locally")
        with Trainer(run_.config) as trainer:
            trainer.load_state_dict({"run": run_.keys.run, "subscription": "actor", "batch": 1})
            run_.publish(trainer, 1)
            # What is complete is consumed and freed, while nothing new is let in.
            unused = run_.counter("completed") - len(run_.trained)
            assert unused >= 4
            run_.train(trainer, unused // 2)
            until(lambda: run_.counter("swept") == len(run_.trained))
            parts.assert_alive()
            assert run_.counter("completed") - len(run_.trained) == unused % 2
            run_.client.config_set("maxmemory", 0)
            run_.train(trainer, 3)
        parts.assert_alive()
        assert len(run_.trained) == len(set(run_.trained))
        assert audit(run_.client, run_.keys).ok


def test_what_parts_say_at_their_start_a_full_redis_takes(server: RedisServer) -> None:
    with connect(server.url) as client:
        keys = Keys("full")
        client.config_set("maxmemory", 1)
        for _ in range(2):
            run(client, scripts.check_schema(keys))
            ensure_lanes(client, keys)
        assert [len(client.xinfo_groups(keys.jobs(lane))) for lane in LANES] == [1] * len(LANES)
        for told in ({"committed": 3}, {}):
            assert run(client, scripts.rolled_back(keys, {"committed": 3})) == told
        assert play.counter(client, keys, "rolled_back:committed") == 3
        assert run(client, scripts.server(keys, "p1", pack({"url": "u", "state": "live"}))) == 1
        assert run(client, scripts.identify(keys, "mine", {"epoch_lines": 4})) == "mine"
        assert run(client, scripts.identify(keys, "other", {"epoch_lines": 5})) == "mine"
        assert client.hget(keys.source, "epoch_lines") == b"4"
        assert run(client, scripts.swap(keys, "evaluating", 0, 3)) == 3
        assert run(client, scripts.write_column("column", 60, {0: b"x"})) == []
        assert run(client, scripts.lost(keys, [("d/0/0", 0, "token")])) == []
