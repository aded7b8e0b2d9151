"""T18: evaluations in a training loop of one's own, and evaluations that no consumer reads."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.console.read.why import chains
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.snapshot import snapshot
from penstock.records.causes import EvaluationsUnread, FileUnwritable
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    beside,
    buffering,
    make_config,
    matches,
    producing,
    publish,
    until,
    until_waits,
    waits,
)

NUM_PROMPTS = 3


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    """Every version is evaluated on three held-out prompts; batches of one group."""
    for name, count in (("train", 50), ("held", NUM_PROMPTS)):
        lines = [json.dumps({"prompt": f"{name}{i}", "label": "x"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "train": [{"name": "d", "path": str(tmp_path / "train.jsonl")}],
        "eval": [{"name": "held", "path": str(tmp_path / "held.jsonl")}],
        "eval_every": 1,
    }
    return make_config(redis_server.url, keys.run, tmp_path, data=data, trainer={"batch_groups": 1})


@pytest.fixture
def parts(config: Config, redis_server: RedisServer, client: redis.Redis, keys: Keys) -> Iterator[None]:
    """Producer, buffer, and a worker that answers whatever is queued."""

    def work(ended: threading.Event) -> None:
        player = Player(client, keys)
        while not ended.is_set():
            version = player.clock
            held = player.lease(8, version=version)
            for one in held:
                player.answer(one, [version])
            if not held:
                ended.wait(0.01)

    with buffering(config), producing(config), beside(work):
        yield


def rows_of(config: Config) -> list[dict[str, Any]]:
    path = config.run_dir / "eval.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(trainer: Trainer, batches: int) -> Iterator[int]:
    """The loop of the README: a version per batch, and a checkpoint after each."""
    publish(trainer)
    while trainer.position < batches:
        batch = trainer.next(timeout=PATIENCE_S)
        trainer.commit(batch)
        yield publish(trainer, batch.n)
        trainer.state_dict()
        trainer.checkpointed()


def test_T18_a_loop_of_ones_own_has_its_evaluations_read_written_and_released(
    config: Config, parts: None, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        for version in train(trainer, 12):
            until(lambda version=version: trainer.evaluations.has(version, "held"))
        assert [one.version for one in trainer.evaluations] == list(range(1, 14))
        until(lambda: not [job for job in client.zrange(keys.ready, 0, -1) if job.startswith(b"held/")])
    assert [(row["dataset"], row["num"]) for row in rows_of(config)] == [("held", NUM_PROMPTS)] * 13
    found = audit(client, keys)
    assert found.ok, found


def admit_evaluation(client: redis.Redis, keys: Keys, version: int) -> None:
    """Admit an evaluation as the producer does."""
    jobs = [play.job(i, n=1, dataset="held", epoch=version) for i in range(NUM_PROMPTS)]
    client.hset(keys.source, "eval_jobs", NUM_PROMPTS)
    admitted = play.admit(client, keys, jobs, lane="eval", source=f"eval@{version}", cohorts=True)
    assert admitted.admitted == NUM_PROMPTS


def finish_evaluation(client: redis.Redis, keys: Keys, version: int, count: int = NUM_PROMPTS) -> None:
    admit_evaluation(client, keys, version)
    Player(client, keys).work(count, version)


def ready(client: redis.Redis, keys: Keys) -> int:
    return int(client.zcard(keys.ready))


def test_I1_I10_an_evaluation_that_no_consumer_reads_is_written_counted_and_released(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    finish_evaluation(client, keys, 1)
    with buffering(config.model_copy(update={"buffer": config.buffer.model_copy(update={"eval_ttl_s": 0.01})})):
        until(lambda: play.counter(client, keys, "unread_evaluations") == NUM_PROMPTS)
        until(lambda: client.hlen(keys.group("held/1/0")) == 0)
        finish_evaluation(client, keys, 2)
        until(lambda: play.counter(client, keys, "unread_evaluations") == 2 * NUM_PROMPTS)
        until(lambda: not ready(client, keys))
        found = audit(client, keys)
    assert found.ok, found
    assert found.tokens["eval"].accounts["evaluated"] == found.tokens["eval"].heard > 0
    rows = [(row["version"], row["num"], row["prompts"], row["asked"], row["asked_share"]) for row in rows_of(config)]
    assert rows == [(1, 3, 3, 3, 1.0), (2, 3, 3, 3, 1.0)]


def test_an_evaluation_with_answers_to_come_is_not_released(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    admit_evaluation(client, keys, 1)
    player = Player(client, keys)
    player.work(NUM_PROMPTS - 1, 1)
    with buffering(config.model_copy(update={"buffer": config.buffer.model_copy(update={"eval_ttl_s": 0.01})})):
        until_waits(client, keys, "evaluations", EvaluationsUnread)
        player.work(1, 1)
        until(lambda: play.counter(client, keys, "unread_evaluations") == NUM_PROMPTS)
    assert [(row["version"], row["prompts"]) for row in rows_of(config)] == [(1, NUM_PROMPTS)]


def test_I8_why_names_evaluations_that_no_consumer_reads_until_one_comes(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    finish_evaluation(client, keys, 1)
    with buffering(config):
        told = until_waits(client, keys, "evaluations", EvaluationsUnread)
        assert told == EvaluationsUnread(evaluations=1, groups=3, ttl_s=600.0)
        (chain,) = chains(snapshot(client, keys))
        assert chain.links[-1].cause == told
        with Trainer(config) as trainer:
            (found,) = until(lambda: list(trainer.evaluations))
            assert found.version == 1
            until(lambda: "evaluations" not in waits(client, keys))
            until(lambda: not ready(client, keys))


def test_a_consumer_that_comes_after_a_release_reads_the_next_evaluation(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    """It also knows the result that the buffer wrote, where both see the run's folder."""
    finish_evaluation(client, keys, 1)
    with buffering(config.model_copy(update={"buffer": config.buffer.model_copy(update={"eval_ttl_s": 0.01})})):
        until(lambda: play.counter(client, keys, "unread_evaluations") == NUM_PROMPTS)
        with Trainer(config) as trainer:
            until(lambda: client.exists(keys.sub("eval")))
            finish_evaluation(client, keys, 2)
            (found,) = until(lambda: list(trainer.evaluations))
            assert found.version == 2
            assert trainer.evaluations.has(1, "held")
    assert [row["version"] for row in rows_of(config)] == [1, 2]


def test_a_released_evaluation_has_one_row_though_its_buffer_was_killed_in_between(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    """The row is there, and its groups too: the next leader releases them and writes nothing."""
    finish_evaluation(client, keys, 1)
    (config.run_dir).mkdir(parents=True)
    (config.run_dir / "eval.jsonl").write_text('{"version": 1, "dataset": "held", "accuracy": 0.5}\n')
    with buffering(config.model_copy(update={"buffer": config.buffer.model_copy(update={"eval_ttl_s": 0.01})})):
        until(lambda: not ready(client, keys))
    assert len(rows_of(config)) == 1


def test_T18_evaluate_has_the_newest_version_evaluated_whatever_eval_every_says(
    config: Config, parts: None, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        *_, last = train(trainer, 2)
        found = trainer.evaluations.evaluate(timeout_s=PATIENCE_S)
        assert found is not None
        assert (found.version, set(found.accuracy)) == (last, {"held"})


def await_reader(client: redis.Redis, keys: Keys) -> None:
    """Wait until a trainer reads evaluations."""
    client.hset(keys.source, "eval_jobs", NUM_PROMPTS)
    until(lambda: client.hexists(keys.sub("eval"), "lanes"))


def test_T18_a_second_publishing_trainer_takes_evaluations_over_when_the_first_one_is_gone(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_join, tries = scripts.join, []

    def counting_join(keys: Keys, sub: str, *args: Any, **options: Any) -> scripts.Call[scripts.Joined]:
        tries.append(sub)
        return real_join(keys, sub, *args, **options)

    monkeypatch.setattr(scripts, "join", counting_join)
    with buffering(config), Trainer(config) as first:
        await_reader(client, keys)
        second = Trainer(config, name="second")
        second.__enter__()
        try:
            count = len(tries)
            # The lease of the first one is renewed between any two looks of the second one.
            until(lambda: client.pexpire(keys.owner("eval"), 6000) and len(tries) > count + 12)
            finish_evaluation(client, keys, 1)
            until(lambda: first.evaluations.has(1, "held"))
            until(lambda: second.evaluations.has(1, "held"))
            assert [one.version for one in second.evaluations] == [1]
            assert not any(who.startswith("trainer:eval") for who in waits(client, keys))
            first.close()
            finish_evaluation(client, keys, 2)
            until(lambda: second.evaluations.has(2, "held"))
            assert [one.version for one in second.evaluations] == [2]
        finally:
            second.close()
    assert [row["version"] for row in rows_of(config)] == [1, 2]


def test_T18_a_reader_of_evaluations_that_lost_its_lease_takes_it_again(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    """As after a stop of its process for longer than the lease."""
    with buffering(config), Trainer(config) as trainer:
        await_reader(client, keys)
        client.set(keys.owner("eval"), "other")
        client.hset(keys.sub("eval"), "owner", "other")
        finish_evaluation(client, keys, 1)
        until(lambda: ready(client, keys) == NUM_PROMPTS)
        client.delete(keys.owner("eval"))
        until(lambda: trainer.evaluations.has(1, "held"))
        assert [one.version for one in trainer.evaluations] == [1]


def test_I8_why_names_the_file_of_evaluations_that_cannot_be_written_until_it_can(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    file = config.run_dir / "eval.jsonl"
    with buffering(config), Trainer(config) as trainer:
        await_reader(client, keys)
        file.mkdir(parents=True)  # no user can append to it, root neither
        finish_evaluation(client, keys, 1)
        told = until_waits(client, keys, "trainer:eval", FileUnwritable, path=str(file))
        found = [chain.to_map() for chain in chains(snapshot(client, keys))]
        assert [one["cause"] for one in found if one["who"] == "trainer:eval"] == [str(told)]
        assert list(trainer.evaluations) == []
        finish_evaluation(client, keys, 2)
        file.rmdir()
        until(lambda: trainer.evaluations.has(2, "held"))
        assert [one.version for one in trainer.evaluations] == [1, 2]
        until(lambda: not ready(client, keys))
        assert not matches(waits(client, keys).get("trainer:eval"), FileUnwritable)
    assert [row["version"] for row in rows_of(config)] == [1, 2]


def test_a_trainer_is_closed_while_the_file_of_evaluations_cannot_be_written(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    file = config.run_dir / "eval.jsonl"
    file.mkdir(parents=True)
    with buffering(config):
        with Trainer(config):
            finish_evaluation(client, keys, 1)
            until_waits(client, keys, "trainer:eval", FileUnwritable)
        file.rmdir()
        with Trainer(config) as trainer:
            until(lambda: trainer.evaluations.has(1, "held"))
            assert [one.version for one in trainer.evaluations] == [1]


def test_a_row_written_by_another_reader_before_the_subscription_is_defined_is_written_once(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer releases unread evaluations until the subscription is defined."""
    real_define = Subscriber.define
    row = {"version": 1, "dataset": "held", "accuracy": 0.5, "num": 3}

    def define(self: Subscriber, *args: Any) -> None:
        if self.name == "eval":
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / "eval.jsonl").write_text(json.dumps(row) + "\n")
        real_define(self, *args)

    monkeypatch.setattr(Subscriber, "define", define)
    finish_evaluation(client, keys, 1)
    with buffering(config), Trainer(config) as trainer:
        until(lambda: trainer.evaluations.has(1, "held"))
        until(lambda: not ready(client, keys))
    assert rows_of(config) == [row]
