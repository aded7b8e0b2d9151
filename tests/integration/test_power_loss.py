"""After a power loss Redis knows less than the newest checkpoint: the trainer goes back to the newest that fits."""

import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.consumers.grpo import checkpoint
from penstock.consumers.trainer import Trainer
from penstock.errors import PenstockError, ProtocolError
from penstock.protocol.audit import audit
from penstock.protocol.scripts import ensure_lanes, version_field
from penstock.records.causes import VersionLost
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration.part_processes import PartProcess, StartPart, start_part
from tests.integration.parts import (
    Player,
    beside,
    buffering,
    jobs_of,
    make_config,
    producing,
    publish,
    step,
    until,
    until_waits,
)

__all__ = ["start_part"]


def working(client: redis.Redis, keys: Keys) -> AbstractContextManager[None]:
    """A worker that answers whatever is queued, under the clock's version."""
    player = Player(client, keys)

    def work(ended: threading.Event) -> None:
        while not ended.wait(0.02):
            for held in player.lease(100, version=player.clock):
                player.answer(held, [player.clock])

    return beside(work)


def announced(client: redis.Redis, keys: Keys) -> list[int]:
    """Versions of the living publications, in order."""
    entries = client.xrange(keys.weights("policy"))
    return [Publication.from_bytes(fields[b"p"], "publication").version for _, fields in entries]


def test_I4_T1_a_power_loss_under_the_newest_checkpoint_is_gone_back_from_and_no_number_is_used_again(
    keys: Keys, tmp_path: Path, models: list[Path], start_part: StartPart
) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    before = tmp_path / "before the loss"

    def config(steps: int) -> Config:
        trainer = {"steps": steps, "checkpoint_every": 1, "batch_groups": 2, "num_threads": 1}
        return make_config(
            server.url,
            keys.run,
            tmp_path,
            trainer=trainer,
            model={"path": str(models[0]), "dtype": "float32"},
            staleness={"mode": "async", "bound": 8},
        )

    def train(steps: int) -> PartProcess:
        """The real trainer, until it has done so many steps; with a buffer, a producer and a worker beside it."""
        with connect(server.url) as client:
            ensure_lanes(client, keys)
            with buffering(config(steps)), producing(config(steps)), working(client, keys):
                trainer = start_part("trainer", config(steps), f"trainer{steps}")
                assert trainer.process.wait(180) == 0, trainer.text()
                return trainer

    try:
        train(2)
        server.stop()
        shutil.copytree(server.folder, before)
        server.start()
        train(3)
        with connect(server.url) as client:
            seen = announced(client, keys)
            assert client.hget(keys.sub("actor"), "cursor") == b"3"
        server.kill()
        shutil.rmtree(server.folder)
        shutil.copytree(before, server.folder)
        server.start()
        with connect(server.url) as client:
            assert client.hget(keys.sub("actor"), "cursor") == b"2", "batch 3 is lost"
            known = announced(client, keys)
            assert max(known) < max(seen)
        log = train(4).text()
        assert "which Redis does not know as committed" in log
        assert "restored step 2 from" in log
        with connect(server.url) as client:
            assert client.hget(keys.sub("actor"), "cursor") == b"4"
            new = announced(client, keys)[len(known) :]
            assert min(new) > max(seen), "a number names one set of weights for ever"
            report = audit(client, keys)
            assert report.ok, report
    finally:
        server.stop()


def test_T1_the_next_version_is_above_those_of_folders_and_of_checkpoints(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8})
    worker = Player(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        until(lambda: client.xlen(keys.jobs("train")) >= 4, "jobs")
        worker.work(2, 1)
        step(trainer)
        assert trainer.state_dict() == {"run": keys.run, "subscription": "actor", "batch": 1, "version": 1}
        (trainer.weights_dir / "v00000005").mkdir()
        worker.work(2, 1)
        batch = trainer.next(timeout=60)
        trainer.commit(batch)
        assert publish(trainer) == 6
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 1, "version": 9})
        assert publish(trainer) == 10
        abandoned = client.hget(keys.sub("actor"), "abandoned").decode()
        assert abandoned == "3-5,3-6,7-9", "those that were lost, those that the rewind left, and those between"


def test_T1_T2_what_was_drawn_with_a_lost_version_is_in_no_batch_and_its_trainer_does_not_wait_for_ever(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8})
    worker = Player(client, keys)
    with buffering(config), producing(config):
        with Trainer(config) as trainer:
            publish(trainer)
            until(lambda: client.xlen(keys.jobs("train")) >= 4, "jobs")
            worker.work(2, 1)
            step(trainer)
            saved = trainer.state_dict()
            trainer.checkpointed()
            # The publication is lost alone, and engines have its weights.
            client.hset(keys.clock, version_field("policy"), 1)
            client.xdel(keys.weights("policy"), "2-0")
            drawn = worker.work(2, 2)
            with pytest.raises(ProtocolError, match="published version 2, but the newest version in Redis is 1"):
                trainer.next(timeout=60)
            until_waits(client, keys, "buffer:actor", VersionLost, version=2)
        with Trainer(config) as trainer:
            trainer.load_state_dict(saved)
            assert publish(trainer) == 3
            worker.work(2, 3)
            batch = step(trainer)
            assert not set(jobs_of(batch)) & set(drawn)
            assert batch.train_version == 3


def test_a_checkpoint_that_does_not_fit_is_passed_over_and_none_that_does_is_a_sentence(tmp_path: Path) -> None:
    for batch in (1, 2, 3):
        checkpoint.save(tmp_path, step=batch, learner={}, trainer={"batch": batch}, keep=3)
    found = checkpoint.latest(tmp_path, fits=lambda state: state["batch"] <= 2)
    assert found is not None
    assert found.step == 2
    with pytest.raises(PenstockError, match=r"no checkpoint in .* fits what Redis knows"):
        checkpoint.latest(tmp_path, fits=lambda state: False)
