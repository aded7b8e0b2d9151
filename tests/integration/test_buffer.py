"""The real buffer on a real Redis: cutting, staleness, retirement, standby, restarts of everything around it."""

from pathlib import Path

import redis

from consumers.trainer import Trainer
from penstock.audit import audit
from penstock.keys import Keys
from penstock.redis_server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    make_config,
    publish,
    step,
    until,
)


def test_a_batch_is_cut_when_asked_for_and_retires_behind_its_checkpoint(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        worker.work(2, 1)
        batch = step(trainer)
        assert jobs_of(batch) == ["d/0/0", "d/0/1"]
        assert (batch.train_version, batch.manifest.staleness_max) == (1, 0)
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 2)
    assert client.keys(keys.of("payload:*").replace("{", "[{]")) == []
    assert audit(client, keys).ok
