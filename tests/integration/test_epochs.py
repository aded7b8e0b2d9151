"""The end of the data (``data.epochs``): every prompt is trained or accounted for, and everybody who waits is told."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.grpo.loop import make_loop
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, DataEnded, LeadershipLost, ProtocolError
from penstock.producer.main import Producer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.causes import DataExhausted, DataUsedUp, GroupsMissing
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    buffering,
    jobs_of,
    make_config,
    producing,
    publish,
    until,
    until_waits,
)
from tests.tiny_model import make_tiny_model

ASYNC: dict[str, Any] = {"mode": "async", "bound": 1}
ONE_STEP: dict[str, Any] = {"mode": "one_step", "bound": 1}
SYNC: dict[str, Any] = {"mode": "sync", "bound": 0}


def ending(
    url: str, keys: Keys, folder: Path, staleness: dict[str, Any] = ASYNC, epochs: int | None = 1, **data: Any
) -> Config:
    """Five prompts a pass, two groups a batch."""
    config = make_config(url, keys.run, folder, staleness=staleness)
    path = Path(config.data.train[0].path)
    path.write_text("".join(f'{{"prompt": "p{i}", "label": "x"}}\n' for i in range(5)))
    data = {"train": config.data.train, "epochs": epochs, **data}
    return Config.model_validate({**config.model_dump(), "data": {**config.data.model_dump(), **data}})


class Drawing:
    """A worker in a thread: answers whatever may be started, under the newest version; buries the jobs named."""

    def __init__(self, url: str, keys: Keys, bury: tuple[str, ...] = ()) -> None:
        self._client = redis.Redis.from_url(url)
        self._player = Player(self._client, keys)
        self._keys, self._bury = keys, bury
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._client.close()

    def _work(self) -> None:
        while not self._stop.wait(0.02):
            older = [int(v) for v in self._client.hkeys(self._keys.cohorts)]
            version = self._player.clock
            # what was admitted under an older version ends under it first, as one_step's workers have it
            engine = min([version, *older])
            for held in self._player.lease(1, version=engine):
                if held.job in self._bury:
                    run(self._client, _fail(self._keys, held, 0))
                else:
                    self._player.answer(held, [engine])


def _fail(keys: Keys, held: scripts.RawLease, max_attempts: int) -> scripts.Call[str]:
    return scripts.fail(
        keys, held.job, held.token, "w1", reason="failed", detail="no answer", max_attempts=max_attempts, retry_ms=1
    )


def train(trainer: Trainer) -> list[list[str]]:
    """All batches to the end of the data, as the jobs in them."""
    batches = []
    for batch in trainer:
        batches.append(jobs_of(batch))
        trainer.commit(batch)
        publish(trainer, batch.n)
    return batches


@contextlib.contextmanager
def playing(config: Config, url: str, keys: Keys, bury: tuple[str, ...] = ()) -> Iterator[Trainer]:
    with buffering(config), producing(config), Drawing(url, keys, bury), Trainer(config) as trainer:
        publish(trainer)
        yield trainer


@pytest.mark.parametrize("staleness", [ASYNC, ONE_STEP, SYNC], ids=lambda one: one["mode"])
@pytest.mark.parametrize(("last_batch", "sizes"), [("drop", [2, 2]), ("train", [2, 2, 1])])
def test_I4_the_data_ends_and_all_of_it_is_trained_but_a_short_batch_by_choice(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    tmp_path: Path,
    staleness: dict[str, Any],
    last_batch: str,
    sizes: list[int],
) -> None:
    config = ending(redis_server.url, keys, tmp_path, staleness, last_batch=last_batch)
    with playing(config, redis_server.url, keys) as trainer:
        batches = train(trainer)
        assert [len(one) for one in batches] == sizes
        trained = [job for batch in batches for job in batch]
        assert len(set(trained)) == sum(sizes)
        assert set(trained) <= {f"d/0/{i}" for i in range(5)}
        with pytest.raises(DataEnded, match=r"last batch of subscription .*Raise data.epochs"):
            trainer.next()
        until_waits(client, keys, "producer", DataExhausted, prompts=5)
        until_waits(client, keys, "buffer:actor", DataUsedUp)
        assert audit(client, keys).ok
    assert int(client.hget(keys.source, "train")) == 5


@pytest.mark.parametrize("staleness", [ASYNC, ONE_STEP, SYNC], ids=lambda one: one["mode"])
def test_I8_a_job_that_was_buried_does_not_hold_the_end_up(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, staleness: dict[str, Any]
) -> None:
    config = ending(redis_server.url, keys, tmp_path, staleness, epochs=2, last_batch="train")
    with playing(config, redis_server.url, keys, bury=("d/0/1", "d/1/4")) as trainer:
        trained = [job for batch in train(trainer) for job in batch]
    wanted = {f"d/{epoch}/{i}" for epoch in range(2) for i in range(5)} - {"d/0/1", "d/1/4"}
    assert sorted(trained) == sorted(wanted)
    assert audit(client, keys).ok


def test_I8_the_end_waits_for_a_job_that_runs_and_for_one_that_is_to_be_tried_again(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = ending(redis_server.url, keys, tmp_path, last_batch="train")
    worker = Player(client, keys)
    ended: list[list[list[str]]] = []
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        consumer = threading.Thread(target=lambda: ended.append(train(trainer)))
        consumer.start()
        until(lambda: client.xlen(keys.jobs("train")) == 4)
        worker.work(4, 1)
        until(lambda: trainer.position >= 2)
        until(lambda: client.xlen(keys.jobs("train")) == 1, "the last prompt")
        (held,) = worker.lease(1, version=worker.clock)
        until_waits(client, keys, "buffer:actor", GroupsMissing, running=1)
        run(client, _fail(keys, held, 3))
        until(lambda: client.xlen(keys.jobs("train")) == 1 and not client.zcard(keys.delayed), "the second try")
        assert client.hget(keys.sub("actor"), "ended") is None
        worker.work(1, worker.clock)
        consumer.join(PATIENCE_S)
    assert [len(one) for one in ended[0]] == [2, 2, 1]


def test_I4_a_producer_that_comes_back_at_the_end_admits_nothing_and_more_passes_go_on(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = ending(redis_server.url, keys, tmp_path, last_batch="train")
    with playing(config, redis_server.url, keys) as trainer:
        assert len(train(trainer)) == 3
        state = trainer.state_dict()
    with producing(config):
        until_waits(client, keys, "producer", DataExhausted, prompts=5)
    assert int(client.hget(keys.source, "train")) == 5
    more = ending(redis_server.url, keys, tmp_path, epochs=2, last_batch="train")
    run(client, scripts.span(keys, None))  # as a start of the run does, so that nobody is told of the old end
    with buffering(more), producing(more), Drawing(redis_server.url, keys), Trainer(more) as trainer:
        trainer.load_state_dict(state)
        publish(trainer)
        trained = [job for batch in train(trainer) for job in batch]
    assert sorted(trained) == [f"d/1/{i}" for i in range(5)]
    with pytest.raises(ConfigError, match=r"data.epochs is 1, but 10 prompts were already admitted, .* 2 or more"):
        Producer(config).run()


def test_I8_every_subscription_is_told_of_the_end(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = ending(redis_server.url, keys, tmp_path)
    with (
        playing(config, redis_server.url, keys) as trainer,
        Trainer(config, name="reader", subscription={"driving": False}, batch_groups=3) as reader,
    ):
        assert len(train(trainer)) == 2
        batch = reader.next(timeout=PATIENCE_S)
        reader.commit(batch)
        with pytest.raises(DataEnded):
            reader.next(timeout=PATIENCE_S)


def test_I8_members_of_a_pool_divide_what_there_is_and_both_end(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = ending(redis_server.url, keys, tmp_path, {"mode": "async", "bound": 8}, last_batch="train")
    shared = {"share": "pool"}
    with (
        buffering(config),
        producing(config),
        Drawing(redis_server.url, keys),
        Trainer(config, subscription=shared) as one,
        Trainer(config, name="two", subscription=shared) as two,
    ):
        publish(one)
        seen: list[str] = []
        for member in (one, two):
            for batch in member:
                seen += jobs_of(batch)
                member.commit(batch)
                if member is one:
                    publish(one, batch.n)
    assert sorted(seen) == [f"d/0/{i}" for i in range(5)]


def test_the_reference_trainer_publishes_saves_and_exits_0_when_the_data_ends(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = ending(redis_server.url, keys, tmp_path, last_batch="train")
    model = config.model.model_copy(update={"path": make_tiny_model(tmp_path / "tiny")})
    trainer = config.trainer.model_copy(update={"steps": 100, "batches_per_version": 2, "num_threads": 1})
    config = config.model_copy(update={"model": model, "trainer": trainer})
    done: list[int] = []
    with buffering(config), producing(config), Drawing(redis_server.url, keys):
        loop = make_loop(config, 0, 1)
        thread = threading.Thread(target=lambda: done.append(loop.run()), daemon=True)
        thread.start()
        thread.join(2 * PATIENCE_S)
    assert done == [0]
    # the last batch was trained between two versions, and is in one
    assert (loop.step, loop.published, loop.published_at) == (3, 3, 3)
    assert (config.run_dir / "checkpoints").is_dir()


def test_T3_the_end_is_a_guard_of_admit(client: redis.Redis, keys: Keys) -> None:
    assert run(client, scripts.span(keys, 3)) == 0
    jobs = [play.job(i) for i in range(5)]
    assert play.admit(client, keys, jobs).admitted == 3
    assert play.admit(client, keys, jobs[3:], position=3).outcome == "ended"
    assert run(client, scripts.span(keys, 2)) == -1
    assert client.hget(keys.source, "end") == b"3"
    client.hset(keys.source, "train", "x")
    for end in (5, None):
        with pytest.raises(ProtocolError, match="position in train is no number"):
            run(client, scripts.span(keys, end))
    assert client.hget(keys.source, "end") == b"3"
    client.hset(keys.source, "train", 3)
    assert run(client, scripts.span(keys, 4)) == 3
    assert play.admit(client, keys, jobs[3:], position=3).admitted == 1


def test_T15_no_batch_is_concluded_while_anything_is_under_way(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    play.subscribe(client, keys)
    play.join(client, keys)
    run(client, scripts.ask(keys, "actor", 1, "owner-1", 0))

    def conclude(end: int = 1, completed: int = 0, lead: scripts.Leadership = leader) -> int:
        call = scripts.conclude(
            keys, lead, "actor", n=1, end=end, completed=completed, lanes=("train", "resume", "suspect")
        )
        return run(client, call)

    assert conclude() == 0, "the data has no end"
    run(client, scripts.span(keys, 1))
    assert conclude() == 0, "not all is admitted"
    play.admit(client, keys, [play.job(0)])
    assert conclude() == 0, "one is queued"
    (held,) = play.lease(client, keys)
    assert conclude() == 0, "one runs"
    play.commit(client, keys, held, [0, 1])
    assert conclude() == 0, "one was completed since"
    with pytest.raises(LeadershipLost):
        conclude(completed=1, lead=scripts.Leadership(leader.epoch, "another"))
    assert conclude(completed=1, end=2) == 0, "the data was made longer"
    assert conclude(completed=1) == 1
    assert client.hget(keys.sub("actor"), "ended") == b"1"
