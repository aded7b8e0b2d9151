"""The worker on real engines: weights before work, true samples, and what kills, stops and signals leave behind."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol import scripts
from penstock.protocol.scripts import ensure_lanes, run
from penstock.records.causes import NoPublication
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from penstock.workers.jobs.prefixes import partial_from_bytes
from tests.integration import play
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.processes import descendants, open_pidfds, wait_gone
from tests.integration.worker_play import (
    admit,
    all_in,
    is_blocked,
    job,
    make_config,
    metas,
    presence,
    publish,
    read_group,
    states,
    tended,
    until,
    working,
)
from tests.integration.worker_process import Start, start

__all__ = ["start"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PARTS = "tests.integration.worker_parts"
#: Long enough to be met while it runs.
#: An idle engine is at it for seconds, so that a worker can be stopped or killed meanwhile.
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
ROOM = {"max_context_tokens": 2048}
SHORT = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def external(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, engine_url: str, tmp_path: Path
) -> Callable[..., Config]:
    """Makes configurations of workers that share the session's engine."""

    def make(url: str = redis_server.url, **sections: Any) -> Config:
        sections["rollout"] = ROOM | sections.get("rollout", {})
        return make_config(url, keys, model_config, tmp_path, engine={"url": engine_url}, **sections)

    return make


def num_running(engine_url: str) -> int:
    """Requests that the engine has drawn tokens for, and goes on with."""
    with urllib.request.urlopen(f"{engine_url}/v1/loads?include=core", timeout=10) as answer:
        return int(sum(load["num_running_reqs"] for load in json.load(answer)["loads"]))


async def test_one_worker_through_its_life(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    engine_url: str,
    start: Start,
    external: Callable[..., Config],
    tmp_path: Path,
) -> None:
    spawned = cpu_engine().model_dump() | {"health_timeout_s": 5.0}
    config = make_config(redis_server.url, keys, model_config, tmp_path, engine=spawned, rollout=ROOM)
    first = admit(client, keys, [job(0, reward=f"{PARTS}:detailed", environment=f"{PARTS}:Echo"), job(1)])
    worker = start(config)

    # I9: nothing is leased before a publication.
    await until(lambda: is_blocked(client, keys, "intake", NoPublication))
    assert states(client, keys, first) == ["queued"] * 2
    await until(lambda: presence(client, keys)["state"] == "no weights")

    # Committed as they were drawn, by a reward and an environment of the user's own.
    publish(client, keys, publications[1])
    await until(all_in(client, keys, first, "ready"))
    for meta, payload in read_group(client, keys, first[0]):
        assert meta.reward == meta.num_generated
        assert meta.reward_info == {"turns": meta.num_turns, "label": "x"}
        assert (meta.oldest, meta.newest) == (1, 1)
        assert len(payload) == meta.prompt_length + meta.num_generated + (3 if meta.num_turns == 2 else 0)

    async with tended(client, keys):
        # The engine is killed under load: charged, back with the newest weights, nothing drawn under older ones.
        second = admit(client, keys, [job(i, sampling=LONG) for i in range(2, 4)])
        await until(lambda: presence(client, keys)["running"] == 4)
        publish(client, keys, publications[2])
        await until(lambda: presence(client, keys)["version"] == 2)
        publish(client, keys, publications[3])
        os.kill(presence(client, keys)["engine_pid"], signal.SIGKILL)
        await until(all_in(client, keys, second, "ready"))
        assert play.counter(client, keys, "crashes") >= 2
        assert {meta.newest for name in second for meta in metas(client, keys, name)} == {3}
        assert {meta.length for name in second for meta in metas(client, keys, name)} == {1503}
        for name in second:
            read_group(client, keys, name)

        # Stopped for longer than its lease: taken over, noticed, nothing written twice, and it goes on.
        third = admit(client, keys, [job(4, sampling=LONG)])
        await until(all_in(client, keys, third, "leased"))
        client.sadd(keys.paused, "resume", "suspect")
        lost = presence(client, keys)["lost_leases"]
        worker.signal(signal.SIGSTOP)
        await until(all_in(client, keys, third, "queued"))
        worker.signal(signal.SIGCONT)
        await until(lambda: presence(client, keys)["lost_leases"] > lost)
        assert (metas(client, keys, third[0]), states(client, keys, third)) == ([], ["queued"])
        client.srem(keys.paused, "resume", "suspect")
        await until(all_in(client, keys, third, "ready"))

        # kill -9: the engine goes too, and a second worker finishes.
        fourth = admit(client, keys, [job(i, sampling=LONG) for i in range(5, 7)])
        await until(all_in(client, keys, fourth, "leased"))
        engine = presence(client, keys)["engine_pid"]
        pidfds = open_pidfds([engine, *descendants(engine)])
        worker.signal(signal.SIGKILL)
        assert await asyncio.to_thread(wait_gone, pidfds, 20) == []
        async with working(external(), "second"):
            await until(all_in(client, keys, fourth, "ready"))
    assert {meta.worker.split(".")[0] for name in fourth for meta in metas(client, keys, name)} == {"second"}
    play.assert_conserved(client, keys)


async def test_sigterm_drains_and_what_is_left_goes_on_from_its_prefix(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    start: Start,
    external: Callable[..., Config],
    engine_url: str,
) -> None:
    publish(client, keys, publications[1])
    short = admit(client, keys, [job(0, sampling=LONG)])
    patient = start(external())
    await until(all_in(client, keys, short, "leased"))
    patient.signal(signal.SIGTERM)
    assert await patient.exit_code() == 0, patient.text()
    assert states(client, keys, short) == ["ready"], "what ran was let end"
    assert play.counter(client, keys, "released") == 0
    assert client.hlen(keys.workers) == 0

    long = admit(client, keys, [job(1, sampling=LONG)])
    hurried = start(external(worker={"drain_timeout_s": 1000}), "hurried")
    await until(all_in(client, keys, long, "leased"))
    # Each sample has a token, at least.
    await until(lambda: num_running(engine_url) == 2)
    hurried.signal(signal.SIGTERM)
    await until(lambda: "draining" in hurried.text())
    hurried.signal(signal.SIGTERM)
    assert await hurried.exit_code() == 0, hurried.text()
    assert states(client, keys, long) == ["queued"]
    assert (play.counter(client, keys, "released"), play.counter(client, keys, "crashes")) == (1, 0)

    publish(client, keys, publications[2])
    prefixes = [
        partial_from_bytes(client.get(keys.partial(f"{long[0]}/{k}")), job(1, sampling=LONG), k) for k in range(2)
    ]
    async with working(external(), "next"):
        await until(all_in(client, keys, long, "ready"))
    for prefix, (meta, payload) in zip(prefixes, read_group(client, keys, long[0]), strict=True):
        drawn = sum(prefix.generated)
        assert 0 < drawn < 1500
        assert payload.tokens[: len(prefix.tokens)].tolist() == prefix.tokens
        assert payload.versions.tolist() == [-1] * 3 + [1] * drawn + [2] * (1500 - drawn)
        assert (meta.oldest, meta.newest, meta.num_generated) == (1, 2, 1500)
    play.assert_conserved(client, keys)


@pytest.mark.parametrize("policy", ["in_place", "abort", "drain"])
async def test_publications_under_load(
    client: redis.Redis, keys: Keys, publications: list[Publication], external: Callable[..., Config], policy: str
) -> None:
    """Two follow each other at once, and the first may be skipped; samples hold what they were drawn with (I7)."""
    publish(client, keys, publications[1])
    jobs = admit(client, keys, [job(i, sampling=LONG | {"max_new_tokens": 300 + 200 * (i % 3)}) for i in range(10)])
    async with working(external(worker={"apply": policy})) as worker:
        await until(lambda: worker.services.num_running == 8)
        await until(lambda: worker.services.engine.num_running == 8)
        publish(client, keys, publications[2])
        publish(client, keys, publications[3])
        await until(lambda: worker.services.engine.version == 3)
        publish(client, keys, publications[4])
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: worker.services.engine.version == 4)
    spans = [payload.spans for name in jobs for _, payload in read_group(client, keys, name)]
    versions = [[version for _, _, version in one] for one in spans]
    assert versions == [sorted(one) for one in versions]
    mixed = [one for one in versions if len(set(one)) > 1]
    assert bool(mixed) == (policy != "drain")
    assert play.counter(client, keys, "weight_updates") >= 2
    assert play.counter(client, keys, "crashes") == 0
    play.assert_conserved(client, keys)


async def test_I4_redis_is_killed_under_a_working_worker(
    publications: list[Publication], external: Callable[..., Config], keys: Keys, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path / "own")
    server.start()
    try:
        client = connect(server.url)
        ensure_lanes(client, keys)
        publish(client, keys, publications[1])
        jobs = admit(client, keys, [job(i, sampling=LONG) for i in range(3)])
        jobs += admit(client, keys, [job(i, sampling=SHORT) for i in range(3, 40)])
        async with working(external(server.url)) as worker:
            await until(lambda: states(client, keys, jobs).count("ready") >= 4)
            server.kill()
            await until(lambda: worker.control.losses > 0)
            server.start()
            client.connection_pool.disconnect()
            async with tended(client, keys):
                await until(all_in(client, keys, jobs, "ready"))
        for name in jobs:
            read_group(client, keys, name)
        assert play.counter(client, keys, "crashes") == 0, "no lease ran out meanwhile"
        assert play.counter(client, keys, "committed") == 80
        play.assert_conserved(client, keys)
        client.close()
    finally:
        server.stop()


async def test_a_wrong_configuration_is_one_sentence(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, start: Start, tmp_path: Path
) -> None:
    worker = start(make_config(redis_server.url, keys, model_config, tmp_path, engine={"url": "http://127.0.0.1:9"}))
    assert await worker.exit_code() == 2
    last = worker.text().strip().splitlines()[-1]
    assert last.startswith("penstock: engine.url http://127.0.0.1:9 does not answer")
    assert run(connect(redis_server.url), scripts.recount(keys)).difference == 0
