"""Engines that die of a publication are charged to it, and to no job; those that die of a job, to that job alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import PublishError
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.records.worker_causes import VersionSetAside
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.part_processes import PartProcess, StartPart, start_part
from tests.integration.parts import jobs_of
from tests.integration.worker_play import is_blocked, make_config, until

__all__ = ["start_part"]

DEADLY = "3-0"
Training = Callable[..., AbstractContextManager[tuple[Trainer, Any]]]


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeEngine]]:
    async with FakeEngine().up() as one, FakeEngine().up() as two:
        yield [one, two]


@pytest.fixture
def start_run(
    redis_server: RedisServer,
    keys: Keys,
    tmp_path: Path,
    models: list[Path],
    fakes: list[FakeEngine],
    start_part: StartPart,
) -> Callable[[str, int], Config]:
    """Starts buffer, producer and two workers as processes; the trainer's configuration."""

    def start(mode: str, bound: int) -> Config:
        prompts = tmp_path / "train.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i}=", "label": "x"}) + "\n" for i in range(200)))

        def config(fake: FakeEngine) -> Config:
            return make_config(
                redis_server.url,
                keys,
                ModelConfig(path=str(models[0]), dtype="float32"),
                tmp_path,
                engine={"url": fake.url, "restart_wait_s": 0.01},
                worker={"lease_s": 10.0, "slots": 4, "max_attempts": 3},
                staleness={"mode": mode, "bound": bound},
                data={"train": [{"name": "d", "path": str(prompts), "shuffle": False}]},
                trainer={"batch_groups": 4, "keep_versions": 4},
                buffer={"lease_s": 2.0},
            )

        started: list[PartProcess] = [start_part(part, config(fakes[0])) for part in ("buffer", "producer")]
        started += [start_part("worker", config(fake), f"w{i}") for i, fake in enumerate(fakes)]
        return config(fakes[0])

    return start


@pytest.fixture
def training(models: list[Path], fakes: list[FakeEngine], start_run: Callable[[str, int], Config]) -> Training:
    """A run whose engines die of the versions ``deadly``, with version 1 published: its trainer and model."""

    @contextmanager
    def begin(mode: str, bound: int, *, deadly: set[str]) -> Iterator[tuple[Trainer, Any]]:
        for fake in fakes:
            fake.deadly = deadly
        model = AutoModelForCausalLM.from_pretrained(models[0])
        with Trainer(start_run(mode, bound)) as trainer:
            trainer.publish(model)
            yield trainer, model

    return begin


def train(trainer: Trainer, model: Any) -> Any:
    batch = trainer.next(timeout=180)
    trainer.commit(batch)
    trainer.publish(model, step=batch.n)
    return batch


def revisions(client: redis.Redis, keys: Keys) -> list[str]:
    return [entry.decode() for entry, _ in client.xrange(keys.weights("policy"))]


async def test_T12_a_version_on_which_engines_die_is_set_aside_and_announced_again_and_no_job_is_buried(
    client: redis.Redis, keys: Keys, fakes: list[FakeEngine], training: Training
) -> None:
    """Mode sync: nothing older may serve, so the trainer announces the version again; then its batch is whole."""

    class UntilAnnouncedAgain(set[str]):
        def __contains__(self, version: object) -> bool:
            return version == "3" and "3-1" not in revisions(client, keys)

    with training("sync", 0, deadly=UntilAnnouncedAgain()) as (trainer, model):
        for _ in range(2):
            assert len(jobs_of(await asyncio.to_thread(train, trainer, model))) == 4
        batch = await asyncio.wait_for(asyncio.to_thread(train, trainer, model), 180)
        assert client.hexists(keys.aside("policy"), DEADLY)
        assert len(jobs_of(batch)) == 4, "no group was cut out of it"
        assert revisions(client, keys)[:4] == ["1-0", "2-0", "3-0", "3-1"]
        assert {row.oldest for row in batch.all_rows} == {3}
    assert client.xlen(keys.dead) == 0
    assert sum(fake.deaths for fake in fakes) >= 3
    assert audit(client, keys).ok


async def test_I8_a_version_that_kills_in_every_announcement_stops_the_run_with_the_reason(
    client: redis.Redis, keys: Keys, training: Training
) -> None:
    with training("sync", 0, deadly={"2"}) as (trainer, model):
        await asyncio.to_thread(train, trainer, model)
        with pytest.raises(
            PublishError,
            match="Engines crashed on version 2 of model 'policy' before producing output after each of its 4 announ",
        ):
            await asyncio.to_thread(train, trainer, model)
        await until(lambda: is_blocked(client, keys, "weights", VersionSetAside, version=2), "for the reason", 400)
    assert revisions(client, keys) == ["1-0", "2-0", "2-1", "2-2", "2-3"]
    assert client.xlen(keys.dead) == 0
    assert audit(client, keys).ok


async def test_T12_the_last_good_version_serves_as_far_as_the_bound_allows(
    client: redis.Redis, keys: Keys, training: Training
) -> None:
    """Mode async: jobs admitted at the version that was set aside are drawn with the one before it."""
    drawn = []
    with training("async", 2, deadly={"3"}) as (trainer, model):
        for _ in range(7):
            batch = await asyncio.to_thread(train, trainer, model)
            drawn.append({row.oldest for row in batch.all_rows})
            assert batch.manifest.staleness_max <= 2, "I6"
    assert all(3 not in one for one in drawn)
    assert all(entry.endswith("-0") for entry in revisions(client, keys)), "nothing was announced again"
    assert client.xlen(keys.dead) == 0
    assert audit(client, keys).ok


# --- by verbs -------------------------------------------------------------------------------------------------------


def crash(client: redis.Redis, keys: Keys, held: Any, engine: str, *, sure: bool = False, on: str = "1-0") -> str:
    call = scripts.crash(
        keys, held.job, held.token, "w", "boom", model="policy", publication=on, engine=engine, sure=sure
    )
    return run(client, call)


def test_a_suspect_is_buried_only_by_an_engine_that_finished_something_else(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.trials("policy"), "ok:1-0", 1)
    play.admit(client, keys, [play.job(0)])
    went = [crash(client, keys, play.lease(client, keys)[0], f"w/{birth}") for birth in range(5)]
    assert went == ["resume", "suspect", "suspect", "suspect", "suspect"], "engines on which others finish"
    assert crash(client, keys, play.lease(client, keys)[0], "w/9", sure=True) == "dead"
    play.assert_conserved(client, keys)


def test_deaths_on_a_version_are_charged_to_it_and_taken_off_the_jobs(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(i) for i in range(4)])
    for birth in (1, 2):  # all of them together
        for held in play.lease(client, keys, most=4):
            crash(client, keys, held, f"w/{birth}")
    assert client.xlen(keys.jobs("suspect")) == 4
    assert not client.exists(keys.aside("policy")), "two deaths may be a job's"
    for birth, went in ((3, "suspect"), (4, "suspect"), (5, "resume")):
        (alone,) = play.lease(client, keys, most=4)
        assert alone.lane == "suspect"
        assert crash(client, keys, alone, f"w/{birth}") == went
    assert client.hgetall(keys.aside("policy")) == {b"1-0": b"boom"}
    assert (client.xlen(keys.jobs("suspect")), client.xlen(keys.jobs("resume"))) == (0, 4)
    assert [client.hget(keys.group(f"d/0/{i}"), "cr") for i in range(4)] == [b"0"] * 4
    held = play.lease(client, keys)[0]
    assert crash(client, keys, held, "w/9") == "resume"
    assert client.hget(keys.group(held.job), "cr") == b"0", "a version that was set aside charges nobody"
    play.assert_conserved(client, keys)
