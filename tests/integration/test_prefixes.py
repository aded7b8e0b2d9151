"""Prefix checkpoints on a real engine (I4, T6): whoever is killed, a sample goes on from what was kept, elsewhere.

The oracle recomputes every logprob under the version that its token is recorded with; a boundary one token off shows.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.payloads import Payload
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from penstock.workers.jobs.prefixes import partial_from_bytes
from tests.integration import oracle, play
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.worker_play import (
    admit,
    all_in,
    job,
    make_config,
    publish,
    read_group,
    tended,
    until,
    working,
)
from tests.integration.worker_process import Start, start
from tests.integration.workload import TOLERANCE, VISIBLE, versions_of

__all__ = ["start"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: An idle engine needs seconds for them: time to see a prefix, publish and kill before the answer is done.
TOKENS = 2000
LONG = {"max_new_tokens": TOKENS, "ignore_eos": True}
EVERY = 20
ROOM = {"max_context_tokens": 2048}


@pytest.fixture
def external(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, engine_url: str, tmp_path: Path
) -> Callable[..., Config]:
    """Makes configurations of workers that share the session's engine and keep prefixes."""

    def make(**sections: Any) -> Config:
        worker = {"checkpoint_tokens": EVERY} | sections.pop("worker", {})
        sections["rollout"] = ROOM | sections.get("rollout", {})
        engine = {"url": engine_url}
        return make_config(redis_server.url, keys, model_config, tmp_path, engine=engine, worker=worker, **sections)

    return make


def sample_of(one: Job, k: int, payload: Payload) -> Sample:
    """The sample that a payload is of, for the oracle."""
    sample = Sample(one, k, prompt_length=payload.prompt_length)
    sample.tokens, sample.logprobs = payload.tokens.tolist(), payload.logprobs.tolist()
    sample.generated, sample.versions = payload.generated.tolist(), payload.versions.tolist()
    return sample


def assert_true(models: dict[int, Any], samples: list[Sample]) -> None:
    """T6: logprobs are those of the recorded versions, and of no versions one token off."""
    gaps = []
    for sample in samples:
        assert oracle.gap(sample, oracle.recompute(models, sample, sample.versions, 1.0)) < TOLERANCE
        if len(versions_of(sample)) > 1:
            for by in (1, -1):
                moved = oracle.shifted(sample.versions, by)
                gaps.append(oracle.gap(sample, oracle.recompute(models, sample, moved, 1.0)))
    assert all(gap > TOLERANCE for gap in gaps)
    assert max(gaps) > VISIBLE


def prefixes(client: redis.Redis, keys: Keys, one: Job) -> list[int]:
    """Drawn tokens that are kept of each sample."""
    kept = []
    for k in range(one.n):
        data = client.get(keys.partial(f"{one.id}/{k}"))
        kept.append(sum(partial_from_bytes(data, one, k).generated) if data else 0)
    return kept


def grown(client: redis.Redis, keys: Keys, one: Job, before: list[int]) -> Callable[[], bool]:
    """Whether every sample has another checkpoint of its own."""
    return lambda: all(n >= b + EVERY for n, b in zip(prefixes(client, keys, one), before, strict=True))


async def test_I4_T6_a_killed_workers_samples_go_on_from_their_checkpoints_across_two_updates(
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    publications: list[Publication],
    start: Start,
    external: Callable[..., Config],
) -> None:
    publish(client, keys, publications[1])
    one = job(0, sampling=LONG)
    jobs = admit(client, keys, [one])
    kept: dict[int, list[int]] = {}
    async with tended(client, keys):
        for version in (1, 3):
            before = kept.get(1, [0, 0])
            worker = start(external(), f"killed{version}")
            await until(grown(client, keys, one, before), "for prefixes")
            worker.signal(signal.SIGKILL)
            await until(all_in(client, keys, jobs, "queued"), "for the lease to run out")
            # Not before: what the worker had sent may still arrive, and the next one is to add to it.
            kept[version] = prefixes(client, keys, one)
            # Two publications while nobody holds it: the one between is never drawn with.
            for newer in (version + 1, version + 2):
                publish(client, keys, publications[newer])
        async with working(external(), "last"):
            await until(all_in(client, keys, jobs, "ready"))

    samples = [sample_of(one, k, payload) for k, (_, payload) in enumerate(read_group(client, keys, jobs[0]))]
    for sample, first, second in zip(samples, kept[1], kept[3], strict=True):
        assert 0 < first < second < TOKENS
        counts = [sample.versions.count(version) for version in (1, 3, 5)]
        assert counts[0] == first
        assert counts[0] + counts[1] == second
        assert sum(counts) == TOKENS
        assert counts[2] > 0
    assert_true({version: oracle.load_model(models[version]) for version in (1, 3, 5)}, samples)
    assert play.counter(client, keys, "crashes") == 2
    assert client.keys(keys.partial("*")) == []
    play.assert_conserved(client, keys)


@pytest.mark.timeout(1200)
async def test_I4_T6_an_engine_killed_between_an_update_and_the_next_token(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    models: list[Path],
    publications: list[Publication],
    external: Callable[..., Config],
    tmp_path: Path,
) -> None:
    """What was heard of the running answers is of the old version, nothing claims the new one, and all goes on."""
    publish(client, keys, publications[1])
    one = job(0, sampling=LONG)
    jobs = admit(client, keys, [one])
    spawned = make_config(
        redis_server.url,
        keys,
        model_config,
        tmp_path,
        engine=cpu_engine().model_dump() | {"health_timeout_s": 5.0},
        rollout=ROOM,
        worker={"checkpoint_tokens": EVERY, "lease_s": 60.0, "heartbeat_s": 1.0},
    )
    async with working(spawned, "killed") as worker:
        engine = worker.services.engine
        # Its start alone takes minutes where others start theirs too.
        await until(lambda: engine.version == 1, "for the engine's start", 600)
        await until(grown(client, keys, one, [0, 0]), "for prefixes")

        async def killed() -> None:
            """The weights are loaded and nothing is thawed."""
            assert engine.version == 2
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)

        engine.resume = killed  # type: ignore[method-assign]
        publish(client, keys, publications[2])
        await until(all_in(client, keys, jobs, "queued"), "for the crash to be charged")
        client.sadd(keys.paused, "resume")
        assert play.counter(client, keys, "crashes") == 1
    heard = prefixes(client, keys, one)
    client.srem(keys.paused, "resume")
    async with working(external(), "next"):
        await until(all_in(client, keys, jobs, "ready"))

    samples = [sample_of(one, k, payload) for k, (_, payload) in enumerate(read_group(client, keys, jobs[0]))]
    for sample, drawn in zip(samples, heard, strict=True):
        assert drawn >= EVERY
        assert sample.versions == [-1] * 3 + [1] * drawn + [2] * (TOKENS - drawn)
    assert_true({version: oracle.load_model(models[version]) for version in (1, 2)}, samples)
    play.assert_conserved(client, keys)


async def test_T6_T8_leases_of_a_few_tokens_across_two_updates(
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    publications: list[Publication],
    external: Callable[..., Config],
) -> None:
    """Each lease goes on from the prefix, under the weights of the day."""
    publish(client, keys, publications[1])
    named = [job(index, first, sampling=LONG | {"max_new_tokens": 1200}) for index, first in enumerate("abc")]
    jobs = admit(client, keys, named)
    rollout = {"lease_tokens": 70}

    def released(times: int) -> Callable[[], bool]:
        return lambda: play.counter(client, keys, "released") >= times

    async with working(external(rollout=rollout, worker={"apply": "abort", "slots": 4})):
        for version, times in ((2, 3), (3, 8)):
            await until(released(times))
            publish(client, keys, publications[version])
        await until(all_in(client, keys, jobs, "ready"))
    samples = []
    for one in named:
        for k, (meta, payload) in enumerate(read_group(client, keys, one.id)):
            assert meta.num_generated == 1200
            samples.append(sample_of(one, k, payload))
    assert any(len(versions_of(sample)) == 3 for sample in samples)
    assert_true({version: oracle.load_model(models[version]) for version in (1, 2, 3)}, samples)
    assert play.counter(client, keys, "released") >= 3 * 5
    assert play.counter(client, keys, "failed") == 0
    play.assert_conserved(client, keys)
