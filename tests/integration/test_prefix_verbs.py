"""The verb that grows a prefix: fenced, said twice without harm, bounded; and what a worker makes of it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.jobs.prefixes import partial_from_bytes
from tests.integration import play
from tests.integration.fake_engine import FIRST, FakeEngine
from tests.integration.worker_play import IDS, admit, all_in, job, make_config, metas, publish, states, until, working


def extend(client: redis.Redis, keys: Keys, held: scripts.RawLease, before: int, record: bytes, most: int = 100) -> str:
    return run(client, scripts.extend(keys, held.job, held.token, 0, record, before=before, ttl_s=60, most=most))


def test_I3_a_prefix_grows_only_under_its_lease_and_once(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    held = play.lease(client, keys)[0]
    assert run(client, scripts.checkpoint(keys, held.job, held.token, 0, b"one", 60))
    name = keys.partial(f"{held.job}/0")
    assert extend(client, keys, held, 3, b"two") == "kept"
    assert extend(client, keys, held, 3, b"two") == "kept", "its reply was lost"
    assert client.get(name) == b"onetwo"
    assert extend(client, keys, held, 5, b"three") == "other"
    assert extend(client, keys, held, 6, b"three", most=10) == "full"
    assert client.get(name) == b"onetwo"
    assert 0 < client.ttl(name) <= 60

    assert run(client, scripts.release(keys, held.job, held.token))
    assert extend(client, keys, held, 6, b"late") == "lost"
    new = play.lease(client, keys, "w2")[0]
    assert extend(client, keys, held, 6, b"late") == "lost"
    assert extend(client, keys, new, 6, b"next") == "kept"
    assert client.get(name) == b"onetwonext"
    play.assert_conserved(client, keys)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(length=40).up() as engine:
        yield engine


@pytest.fixture
def config(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    fake: FakeEngine,
    tmp_path: Path,
) -> Callable[..., Config]:
    publish(client, keys, publications[1])

    def make(rollout: dict[str, Any] | None = None, **worker: Any) -> Config:
        rollout = {"sampling": {"max_new_tokens": 100}} | (rollout or {})
        return make_config(
            redis_server.url, keys, model_config, tmp_path, engine={"url": fake.url}, worker=worker, rollout=rollout
        )

    return make


async def test_I4_what_a_running_answer_has_drawn_is_kept_and_gone_when_it_is_committed(
    client: redis.Redis, keys: Keys, config: Callable[..., Config], fake: FakeEngine
) -> None:
    one = job(0)
    jobs = admit(client, keys, [one])
    fake.open.clear()
    async with working(config(checkpoint_tokens=2)) as at_work:
        for k in range(2):
            data = await until(lambda k=k: client.get(keys.partial(f"{one.id}/{k}")), "for a prefix")
            assert partial_from_bytes(data, one, k).tokens == [IDS["a"], IDS["0"], IDS["="], *FIRST]
        assert states(client, keys, jobs) == ["leased"]
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert at_work.services.tally.checkpoints == 2
    assert client.keys(keys.partial("*")) == []


async def test_without_the_option_nothing_is_streamed_or_kept(
    client: redis.Redis, keys: Keys, config: Callable[..., Config], fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config()) as worker:
        await until(lambda: fake.num_running == 2)
        assert fake.num_streamed == 0
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert worker.services.tally.checkpoints == 0


async def test_I4_a_request_that_dies_in_its_stream_is_gone_on_with_from_what_was_heard(
    client: redis.Redis, keys: Keys, config: Callable[..., Config], fake: FakeEngine
) -> None:
    """No checkpoint was due yet: the worker lives, so it keeps what it heard."""
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config(checkpoint_tokens=1000)) as worker:
        await until(lambda: worker.services.num_running == 2 and fake.num_streamed == 2)
        prompt = [IDS["a"], IDS["0"], IDS["="]]
        held = worker.held[jobs[0]]
        await until(lambda: all(len(sample.tokens) == 6 for sample in held.samples.values()))
        fake.die()
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.prompts[2:] == [prompt + FIRST] * 2


async def test_a_job_whose_samples_used_up_their_lease_is_queued_anew_at_no_charge(
    client: redis.Redis, keys: Keys, config: Callable[..., Config], fake: FakeEngine
) -> None:
    """One of two is through under the first lease; only the other one is gone on with."""
    fake.short = "d/0/0/1:"
    jobs = admit(client, keys, [job(0)])
    client.sadd(keys.paused, "resume")
    async with working(config({"lease_tokens": 30})):
        await until(lambda: play.counter(client, keys, "released") == 1)
        assert states(client, keys, jobs) == ["queued"]
        assert len(metas(client, keys, jobs[0])) == 1
        fake.length = 10
        client.srem(keys.paused, "resume")
        await until(all_in(client, keys, jobs, "ready"))
    assert play.counter(client, keys, "crashes") == play.counter(client, keys, "failed") == 0
    assert sorted(meta.num_generated for meta in metas(client, keys, jobs[0])) == [6, 40]
    assert [len(prompt) for prompt in fake.prompts] == [3, 3, 33]
    assert client.keys(keys.partial("*")) == []
    play.assert_conserved(client, keys)
