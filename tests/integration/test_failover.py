"""Sentinel fails over to a replica: every part goes on, and what the replica had not got is reported, not hidden."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import safetensors.torch

from penstock.config import Config, ModelConfig
from penstock.config.sentinel import parse
from penstock.console.cli.inspect import rollback_line
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import ensure_lanes, run
from penstock.protocol.snapshot import snapshot
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect, translate
from penstock.redis.server import RedisServer
from tests.integration import play, worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import (
    Player,
    buffering,
    jobs_of,
    make_config,
    producing,
    publish,
    step,
    until,
)
from tests.integration.sentinels import Sentinels, sentinels
from tests.integration.worker_play import working

#: Batches of 2 groups that are trained in all, and before the primary is killed.
BATCHES, BEFORE = 12, 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Sentinels]:
    with sentinels(tmp_path / "cluster") as made:
        yield made


class Survivor:
    """A trainer as a user runs it: an error of penstock sends it back to its last checkpoint."""

    def __init__(self, config: Config, weights: dict[str, Any]) -> None:
        self.config = config
        self.weights = weights
        #: Jobs by batch, in the lineage of the weights.
        self.trained: dict[int, list[str]] = {}
        self.state = {"run": config.run, "subscription": "actor", "batch": 0}
        self.errors: list[str] = []

    def train(self, upto: int) -> None:
        while max(self.trained, default=0) < upto:
            try:
                self._train(upto)
            except PenstockError as exc:
                self.errors.append(str(exc))

    def _train(self, upto: int) -> None:
        with Trainer(self.config) as trainer:
            trainer.load_state_dict(self.state)
            self.trained = {n: jobs for n, jobs in self.trained.items() if n <= self.state["batch"]}
            trainer.publish(self.weights)
            while max(self.trained, default=0) < upto:
                batch = trainer.next(timeout=120)
                batch.arrays()
                trainer.commit(batch)
                self.trained[batch.n] = jobs_of(batch)
                trainer.publish(self.weights, step=batch.n)
                if batch.n % 2 == 0:
                    state = trainer.state_dict()
                    self.state = state
                    trainer.checkpointed()


async def test_I4_a_sentinel_failover_is_survived_by_every_part(
    cluster: Sentinels, keys: Keys, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    """Real producer, buffer, worker and trainer; the primary is killed (-9) under load."""
    weights = safetensors.torch.load_file(Path(publications[1].path) / "model.safetensors")
    async with FakeEngine().up() as fake:
        config = worker_play.make_config(
            cluster.url,
            keys,
            model_config,
            tmp_path,
            engine={"url": fake.url},
            data={"train": [{"name": "d", "path": str(tmp_path / "train.jsonl"), "shuffle": False}]},
            staleness={"mode": "async", "bound": 2},
            trainer={"batch_groups": 2},
        )
        trainer = Survivor(config, weights)
        with connect(cluster.primary.url) as client:
            ensure_lanes(client, keys)
        with buffering(config), producing(config):
            async with working(config) as worker:
                await asyncio.to_thread(trainer.train, BEFORE)
                training = asyncio.create_task(asyncio.to_thread(trainer.train, BATCHES))
                await worker_play.until(lambda: max(trainer.trained, default=0) > BEFORE)
                cluster.primary.kill()
                await worker_play.until(lambda: worker.control.losses > 0)
                await asyncio.wait_for(training, 200)
    with connect(cluster.replica.url) as client:
        jobs = [job for n in sorted(trainer.trained) for job in trainer.trained[n]]
        assert len(jobs) == len(set(jobs)) == 2 * BATCHES, "exactly once in the lineage of the weights"
        play.assert_conserved(client, keys)
        report = audit(client, keys)
        assert report.ok, report


def test_I4_what_a_failover_loses_is_told_and_the_rest_is_consistent(
    cluster: Sentinels, keys: Keys, tmp_path: Path
) -> None:
    """The replica gets nothing of a publication, a committed batch, commits and admissions; then it is the primary."""
    config = make_config(cluster.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8})
    with connect(cluster.primary.url) as client:
        ensure_lanes(client, keys)
        with buffering(config) as buffer, producing(config), Trainer(config) as trainer:
            publish(trainer)
            worker = Player(client, keys)
            until(lambda: client.xlen(keys.jobs("train")) >= 6)
            worker.work(4, 1)
            assert step(trainer).n == 1
            state = trainer.state_dict()
            trainer.checkpointed()
            cluster.until_in_step()
            cluster.cut_replication()
            lost = [*jobs_of(step(trainer)), *worker.work(2, 2), *jobs_of(step(trainer))]
            newest = trainer.version
            until(lambda: buffer.rollback.seen.get("cut") == 3, "the leader to have seen it")
            cluster.primary.kill()
            cluster.until_failed_over()
            with pytest.raises(ProtocolError, match="as in a failover"):
                step(trainer)
            with connect(cluster.replica.url) as kept:
                until(lambda: "rolled_back" in snapshot(kept, keys)["counters"], "the leader to tell of it")
    with connect(cluster.replica.url) as client, buffering(config), producing(config):
        # An engine that loaded the lost version still holds it, and shows it as soon as it finds the new primary.
        show(client, keys, newest)
        with Trainer(config) as trainer:
            trainer.load_state_dict(state)
            assert publish(trainer) == newest + 1, "no number ever names two sets of weights (T1)"
            Player(client, keys).work(2, newest + 1)
            again = [*jobs_of(step(trainer)), *jobs_of(step(trainer))]
        assert set(again) <= set(lost), "what was lost is made again"
        assert len(again) == len(set(again)) == 4
        line = rollback_line(snapshot(client, keys)["counters"])
        assert line.startswith("Redis lost acknowledged writes 1 times (failover, power loss), at least:")
        assert {"committed 4", "cut 2", "published 2"} <= set(line.partition("least: ")[2].split(", "))
        play.assert_conserved(client, keys)
        assert audit(client, keys).ok


def show(client: redis.Redis, keys: Keys, version: int) -> None:
    """As a worker's presence."""
    run(client, scripts.note(keys, keys.workers, "w1", pack({"name": "w1", "version": version, "at": time.time()})))


def test_a_script_on_a_primary_that_was_demoted_is_tried_again_elsewhere(tmp_path: Path) -> None:
    """6.2 wraps READONLY into another error; taken literally it would kill every part."""
    first, second = RedisServer(tmp_path / "a"), RedisServer(tmp_path / "b")
    with contextlib.ExitStack() as stack:
        for server in (first, second):
            server.start()
            stack.callback(server.stop)
        client = stack.enter_context(connect(first.url))
        keys = Keys("r")
        client.replicaof("127.0.0.1", second.port)
        with pytest.raises(redis.exceptions.ReadOnlyError):
            run(client, scripts.note(keys, keys.waits, "me", b"x"))
        with pytest.raises(ConfigError, match="is a replica and refuses writes"):
            connect(first.url)


def test_sentinels_that_know_no_primary_are_named(cluster: Sentinels) -> None:
    with pytest.raises(QueueUnavailable, match="know no primary of this name that is up"):
        connect(cluster.url.replace("/control", "/none"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+sentinel://h:1", "NAME being what the sentinels watch"),
        ("redis+sentinel:///name", "NAME being what the sentinels watch"),
        ("redis+sentinel://h:x/name", "'x' is not a port"),
        ("redis+sentinel://h:1,:2/name", "one of its sentinels has no host"),
        ("redis+sentinel://h:1/name/x", "'x' after the name is not a database number"),
        ("redis+sentinel://h:1/name?ssl=1", "unknown option 'ssl'"),
    ],
)
def test_a_sentinel_url_that_cannot_be_read_is_a_sentence(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(url)


def test_a_sentinel_url_is_read_and_its_passwords_are_masked() -> None:
    url = "redis+sentinel://u:p%40ss@a:1,b,[::1]:3/main/2?sentinel_password=deep"
    wanted = parse(url)
    assert wanted.sentinels == (("a", 1), ("b", 26379), ("::1", 3))
    assert (wanted.name, wanted.db) == ("main", 2)
    assert wanted.login == {"username": "u", "password": "p@ss"}
    assert wanted.sentinel_login == {"password": "deep"}
    said = str(translate(redis.ConnectionError("gone"), url))
    assert "deep" not in said
    assert "p%40ss" not in said
