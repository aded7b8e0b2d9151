"""What a reward says beside its number is bounded where it is written; a group that cannot be read stops nobody."""

from pathlib import Path

import pytest
import redis

from penstock.config import ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import RewardError
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.rewards.outcomes import MAX_INFO_BYTES, number_of
from tests.integration import play
from tests.integration.parts import Player, admit, jobs_of, make_config, publish, step, until
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import rig, server
from tests.integration.worker_play import letters

__all__ = ["parts", "server"]


def test_what_a_reward_says_beside_its_number_is_bounded() -> None:
    assert number_of({"score": 1, "log": "x" * (MAX_INFO_BYTES - 100)}, "d/0/0/0", "r", "score")[0] == 1.0
    with pytest.raises(RewardError, match="gave more than 262,144 values and characters beside") as caught:
        number_of({"score": 1, "log": "x" * 9 * 2**20}, "d/0/0/0", "r", "score")
    assert caught.value.outcome == "reward_too_large"
    with pytest.raises(RewardError, match=r"gave 400,\d+ bytes beside its number") as caught:
        number_of({"score": 1, "log": "\u00e4" * 200_000}, "d/0/0/0", "r", "score")
    assert caught.value.outcome == "reward_too_large"


def test_T11_a_reward_that_says_too_much_fails_its_own_job_by_name_and_no_other(
    server: RedisServer, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    reward = {"function": "tests.integration.worker_parts:says_much_of_the_first", "key": "score"}
    with rig(server, parts, model_config, publications[1], tmp_path, reward=reward) as run_:
        for name in ("buffer", "producer", "worker"):
            parts.start(name, run_.config)
        with Trainer(run_.config) as trainer:
            run_.publish(trainer)
            run_.train(trainer, 2)
            until(lambda: letters(run_.client, run_.keys))
        letter = letters(run_.client, run_.keys)["d/0/0"]
        assert letter["reason"] == "reward_too_large"
        assert "beside its number" in letter["detail"]
        parts.assert_alive()
        assert "d/0/0" not in run_.trained
        assert audit(run_.client, run_.keys).ok


def test_I8_a_group_that_cannot_be_read_is_given_up_by_name_and_stops_neither_buffer_nor_audit(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, parts: Parts, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 5)
        jobs = Player(client, keys).work(5, 1)
        client.append(keys.meta(jobs[0]), b"\xc1 what no penstock wrote")
        report = audit(client, keys)
        assert not report.ok
        assert [one for one in report.differences if jobs[0] in one and "cannot be read" in one]
        buffer = parts.start("buffer", config)
        trained = [job for _ in range(2) for job in jobs_of(step(trainer))]
        assert sorted(trained) == jobs[1:]
        buffer.until_says(f"group {jobs[0]} is unreadable")
        until(lambda: play.state(client, keys, jobs[0]) in ("retiring", "gone"), "it to be given up")
        assert client.hget(keys.sub("actor"), "drop:unreadable") == b"1"
        buffer.restart()
        buffer.until_says("leading in epoch")
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 5)
        parts.assert_alive()
    assert audit(client, keys).ok
