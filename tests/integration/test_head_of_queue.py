"""The head of a queue never keeps back a job that some engine may start: T12 holds up the job itself, nobody else."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.records.codec import unpack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import jobs_of
from tests.integration.worker_play import IDS, make_config, until

__all__ = ["start_part"]

Back = Callable[[redis.Redis, Keys, RawLease], object]


def retried(client: redis.Redis, keys: Keys, held: RawLease) -> None:
    fail = scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=9, retry_ms=0)
    assert run(client, fail) == "delayed"
    assert run(client, scripts.due(keys)) == 1


def released(client: redis.Redis, keys: Keys, held: RawLease) -> None:
    assert run(client, scripts.release(keys, held.job, held.token))


def crashed(client: redis.Redis, keys: Keys, held: RawLease) -> None:
    assert run(client, scripts.crash(keys, held.job, held.token, "w", "boom")) in ("resume", "suspect")


def reclaimed(client: redis.Redis, keys: Keys, held: RawLease) -> None:
    """As ``reclaim`` moves it; when a lease has run out is not asked here."""
    run(client, scripts.abandon(keys, held.lane, "w1", []))


WAYS: dict[str, Back] = {"retried": retried, "released": released, "crashed": crashed, "reclaimed": reclaimed}


def clock(client: redis.Redis, keys: Keys, version: int) -> None:
    client.hset(keys.clock, scripts.version_field(play.MODEL), version)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", ["eval", "score", "train"])
def test_T12_a_job_that_comes_back_is_not_held_up_by_jobs_of_a_later_version(
    client: redis.Redis, keys: Keys, lane: str, way: str
) -> None:
    """In its own lane or in lane resume, where jobs of the later version wait before it."""
    clock(client, keys, 1)
    play.admit(client, keys, [play.job(0), play.job(1)], lane=lane)
    early = play.lease(client, keys, most=2, version=1)
    clock(client, keys, 2)
    play.admit(client, keys, [play.job(i) for i in range(2, 6)], lane=lane)
    for one in play.lease(client, keys, "newer", most=2, version=2):
        WAYS["released"](client, keys, one)  # two of version 2 at the head of resume, two at that of their lane
    for one in early:
        WAYS[way](client, keys, one)
    assert [one.job for one in play.lease(client, keys, most=9, version=1)] == ["d/0/0", "d/0/1"]
    assert [one.job for one in play.lease(client, keys, most=9, version=2)] == [f"d/0/{i}" for i in range(2, 6)]
    play.assert_conserved(client, keys)


def test_T12_a_suspect_and_a_requeued_job_hold_up_nobody(client: redis.Redis, keys: Keys) -> None:
    clock(client, keys, 1)
    play.admit(client, keys, [play.job(i) for i in range(4)])
    suspects = play.lease(client, keys, most=2, version=1)
    begun, late = play.lease(client, keys, most=2, version=1)
    play.commit(client, keys, begun, [0], 1)
    bury = scripts.fail(keys, begun.job, begun.token, "w", reason="r", detail="", max_attempts=0, retry_ms=1)
    assert run(client, bury) == "dead"
    clock(client, keys, 2)
    assert run(client, scripts.requeue(keys, begun.job, play.MODEL)), "of version 2 now, at the head of resume"
    released(client, keys, late)
    assert [one.job for one in play.lease(client, keys, most=9, version=1)] == [late.job]
    client.hset(keys.group(suspects[0].job), "nb", 2)
    for one in suspects:
        client.hset(keys.group(one.job), "cr", 1)
        crashed(client, keys, one)
    assert [one.job for one in play.lease(client, keys, most=9, version=1)] == [suspects[1].job]
    assert [one.lane for one in play.lease(client, keys, most=9, version=2)] == ["suspect", "resume"]


def test_I1_an_entry_that_left_its_lane_is_passed_over(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    client.xdel(keys.jobs("train"), client.hget(keys.group("d/0/0"), "eid"))
    assert [one.job for one in play.lease(client, keys, most=9)] == ["d/0/1"]


# --- with every part as a process of its own ------------------------------------------------------------------------


@pytest.fixture
def one_step(
    redis_server: RedisServer, keys: Keys, tmp_path: Path, publications: list[Publication], fake: FakeEngine
) -> Callable[..., tuple[Config, Any]]:
    """Configuration of a run of mode one_step, and the model that it trains."""
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{letter}=", "label": "x"}) + "\n" for letter in "abcdefgh"))
    path = publications[0].path

    def make(**worker: object) -> tuple[Config, Any]:
        config = make_config(
            redis_server.url,
            keys,
            ModelConfig(path=path, dtype="float32"),
            tmp_path,
            engine={"url": fake.url},
            worker={"retry_s": 3600.0, "lease_s": 4.0, "max_attempts": 5, "slots": 16, **worker},
            staleness={"mode": "one_step", "bound": 1},
            data={"train": [{"name": "d", "path": str(prompts), "shuffle": False}]},
            trainer={"batch_groups": 2, "keep_versions": 3},
            buffer={"lease_s": 2.0},
        )
        return config, AutoModelForCausalLM.from_pretrained(path)

    return make


def versions_of_workers(client: redis.Redis, keys: Keys) -> list[int]:
    return [unpack(record, "presence")["version"] for record in client.hvals(keys.workers)]


def train(trainer: Trainer, model: object) -> list[str]:
    batch = trainer.next(timeout=120)
    trainer.commit(batch)
    trainer.publish(model, step=batch.n)  # type: ignore[arg-type]
    return jobs_of(batch)


async def test_T5_one_step_goes_on_after_a_job_of_an_older_cohort_failed_once(
    client: redis.Redis,
    keys: Keys,
    fake: FakeEngine,
    start_part: StartPart,
    one_step: Callable[..., tuple[Config, Any]],
) -> None:
    """It comes back to lane train, behind the cohort of the next version."""
    config, model = one_step()
    fake.behaviour[IDS["d"]] = "500"
    for part in ("buffer", "producer", "worker"):
        start_part(part, config)
    with Trainer(config) as trainer:
        trainer.publish(model)
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/0", "d/0/1"]
        await until(lambda: client.xlen(keys.jobs("train")) == 2, "for the cohort of version 2", 120)
        await until(lambda: client.zscore(keys.delayed, "d/0/3") is not None, "for the failure", 120)
        assert fake.loads == ["1"], "version 2 waits for the cohort of version 1"
        fake.behaviour.clear()
        client.zadd(keys.delayed, {"d/0/3": 0})
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/2", "d/0/3"]
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/4", "d/0/5"]
    assert audit(client, keys).ok


async def test_T5_one_step_goes_on_after_a_job_of_an_older_cohort_was_handed_back(
    client: redis.Redis,
    keys: Keys,
    fake: FakeEngine,
    start_part: StartPart,
    one_step: Callable[..., tuple[Config, Any]],
) -> None:
    """Its worker leaves; it comes back to lane resume, behind jobs of the next version."""
    config, model = one_step(drain_timeout_s=0.0)
    fake.held = ("d/0/3/",)
    for part in ("buffer", "producer"):
        start_part(part, config)
    workers = [start_part("worker", config, name) for name in ("one", "two")]
    with Trainer(config) as trainer:
        trainer.publish(model)
        await until(lambda: versions_of_workers(client, keys) == [1, 1], "for both workers", 120)
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/0", "d/0/1"]
        newer = await until(lambda: play.lease(client, keys, "another", most=2, version=2), "for the next cohort", 120)
        assert {one.not_before for one in newer} == {2}
        for one in newer:
            assert run(client, scripts.release(keys, one.job, one.token))
        await until(lambda: fake.num_running == 2, "for the job at the engine", 120)
        assert versions_of_workers(client, keys) == [1, 1], "version 2 waits for the cohort of version 1"
        owner = client.hget(keys.group("d/0/3"), "own").decode()
        leaver = workers[0] if owner.startswith("one.") else workers[1]
        leaver.signal(signal.SIGTERM)
        await until(lambda: leaver.process.poll() == 0, "for the worker to leave", 120)
        fake.rest.set()
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/2", "d/0/3"]
        assert await asyncio.to_thread(train, trainer, model) == ["d/0/4", "d/0/5"]
    assert audit(client, keys).ok
