"""What a user meets first when something is missing is said in full, and rows come in one order."""

from pathlib import Path

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, WaitTimeout
from penstock.records.causes import GroupsMissing
from penstock.records.keys import Keys
from penstock.records.worker_causes import NotReported
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration.parts import Player, admit, buffering, make_config, publish, until_waits
from tests.integration.storage_parts import Parts, parts

__all__ = ["parts"]


def test_rows_of_a_group_come_by_k_in_whatever_order_they_were_committed(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout={"n": 4}, trainer={"batch_groups": 2})
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2, n=4)
        worker = Player(client, keys)
        for held, order in zip(worker.lease(2, version=1), ([3, 1, 0, 2], [2, 3, 1, 0]), strict=True):
            for k in order:
                worker.answer(held, [1], ks=[k])
        assert [row.k for row in trainer.next(timeout=60).all_rows] == [0, 1, 2, 3] * 2


def test_a_wait_in_vain_tells_what_the_buffer_waits_for(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with Trainer(config) as trainer:
        publish(trainer)
        with pytest.raises(WaitTimeout, match="0 groups are ready, and no buffer reports what it waits for") as told:
            trainer.next(timeout=0.1)
        assert (told.value.count, told.value.cause) == (0, NotReported())
        with buffering(config):
            admit(client, keys, 1)
            Player(client, keys).work(1, 1)
            until_waits(client, keys, "buffer:actor", GroupsMissing, have=1, size=2)
            with pytest.raises(WaitTimeout, match=r"1 of 2 are ready, and the buffer waits for 1 more groups") as told:
                trainer.next(timeout=0)
            assert (told.value.count, type(told.value.cause)) == (1, GroupsMissing)


def test_a_checkpoint_that_names_no_batch_is_refused_in_words(
    redis_server: RedisServer, keys: Keys, tmp_path: Path
) -> None:
    with Trainer(make_config(redis_server.url, keys.run, tmp_path)) as trainer:
        with pytest.raises(ConfigError, match=r"has no valid batch \(batch is None\)"):
            trainer.load_state_dict({"run": keys.run, "subscription": "actor"})
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})


def test_the_last_evaluation_can_be_asked_for_while_redis_is_full(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with Trainer(make_config(redis_server.url, keys.run, tmp_path)) as trainer:
        client.config_set("maxmemory", 1)
        try:
            trainer.ask_evaluation(3)
        finally:
            client.config_set("maxmemory", 0)
    assert client.hget(keys.clock, "final") == b"3"


def test_I4_a_redis_without_an_append_only_file_is_refused_unless_told(
    keys: Keys, parts: Parts, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        with connect(server.url) as own:
            own.config_set("appendonly", "no")
        refused = parts.start("buffer", make_config(server.url, keys.run, tmp_path))
        assert refused.process is not None
        assert refused.process.wait(60) == 2
        assert "keeps no append-only file" in refused.text()
        told = make_config(server.url, keys.run, tmp_path, redis={"url": server.url, "require_aof": False})
        parts.start("buffer", told).until_says("leading in epoch")
    finally:
        server.stop()
