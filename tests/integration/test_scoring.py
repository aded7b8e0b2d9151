"""Scoring jobs: what was asked comes back in order with its version, once, whoever dies; nothing is left behind.

Against the real engine: the scores of an answer are the logprobs it was sampled with at temperature 1, and the oracle's
under other weights.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.config import Config, ModelConfig
from penstock.consumers.scorer import MAX_SEQUENCES, Scorer
from penstock.errors import ConfigError, ScoreError, WaitTimeout
from penstock.protocol import score_jobs, scripts
from penstock.protocol.scripts import run
from penstock.records.causes import ScoresPending
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from tests.integration import oracle, play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering
from tests.integration.processes import open_pidfds, wait_gone
from tests.integration.worker_play import (
    admit,
    all_in,
    is_blocked,
    job,
    letters,
    make_config,
    publish,
    read_group,
    tended,
    until,
    wait_of,
    working,
)
from tests.integration.worker_process import Start, start

__all__ = ["start"]

Make = Callable[..., Config]


def score_groups(client: redis.Redis, keys: Keys) -> list[bytes]:
    return list(client.keys(keys.of("*score-*").replace("{", "[{]").replace("}", "[}]")))


def lease_tokens(client: redis.Redis, keys: Keys) -> set[str]:
    """Tokens of the leases that score jobs are held under."""
    groups = client.keys(keys.group("score-*").replace("{", "[{]").replace("}", "[}]"))
    return {token.decode() for token in (client.hget(group, "tok") for group in groups) if token}


async def assert_nothing_left(client: redis.Redis, keys: Keys, killed: Set[str] = frozenset()) -> None:
    """Groups, metadata, payloads are gone; only the done bits of the jobs stay.

    ``killed``: tokens of leases that were killed. What these wrote and did not live to commit is nobody's, and expires.
    """

    def is_nobodys(key: bytes) -> bool:
        return key.decode().rpartition(":")[2] in killed and client.ttl(key) > 0

    await until(lambda: all(b":done:" in key or is_nobodys(key) for key in score_groups(client, keys)), "for the sweep")
    play.assert_conserved(client, keys)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().up() as engine:
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
) -> Make:
    publish(client, keys, publications[1])

    def make(**sections: Any) -> Config:
        engine = {"url": fake.url} | sections.pop("engine", {})
        buffer = {"lease_s": 2.0} | sections.pop("buffer", {})
        return make_config(redis_server.url, keys, model_config, tmp_path, engine=engine, buffer=buffer, **sections)

    return make


async def test_scores_come_back_in_order_and_leave_nothing_behind(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    """The fake engine scores a token as minus its id over a hundred."""
    sequences = [[2 + i % 5, *range(3, 5 + i % 7)] for i in range(3 * MAX_SEQUENCES + 5)]
    starts = [1 + i % 2 for i in range(len(sequences))]
    starts[7] = len(sequences[7])
    with buffering(config()):
        async with working(config()):
            with Scorer(config()) as scorer:
                for _ in range(2):
                    scores = await scorer.ascore(sequences, starts, timeout_s=60)
                    for one, tokens, begin in zip(scores, sequences, starts, strict=True):
                        assert one.logprobs.dtype == np.float32
                        np.testing.assert_allclose(one.logprobs, [-token / 100 for token in tokens[begin:]], rtol=1e-6)
                    assert {one.version for i, one in enumerate(scores) if i != 7} == {1}
        await assert_nothing_left(client, keys)
    assert play.counter(client, keys, "retired") == 2 * 4
    assert play.counter(client, keys, "committed") == 2 * (len(sequences) - 1)


async def test_mistakes_are_named_before_anything_is_asked(client: redis.Redis, keys: Keys, config: Make) -> None:
    with Scorer(config()) as scorer:
        for sequences, starts, says in (
            ([[2, 3]], [1, 1], "1 sequences but 2 starts"),
            ([[2, 3], [4]], [1, 0], "sequence 1 has 1 tokens and start 0"),
            ([[2, 3]], [3], "start 3"),
            ([[2, -3]], [1], "id -3"),
        ):
            with pytest.raises(ConfigError, match=says):
                scorer.score(sequences, starts)
        assert scorer.score([], []) == []
    assert play.counter(client, keys, "admitted") == 0


async def test_what_cannot_be_scored_is_an_error_with_its_reason_and_its_siblings_are_taken_back(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.behaviour[9] = "400"
    with buffering(config()):
        async with working(config()):
            with Scorer(config()) as scorer:
                with pytest.raises(
                    ScoreError, match=r"Sequences 0 to 0 .* is a dead letter \(refused\): .*told to answer 400"
                ):
                    await scorer.ascore([[9, 3]], [1])
                with pytest.raises(
                    ScoreError,
                    match=r"is a dead letter \(refused\): .*has token id 100000, but the model.s ids are below",
                ):
                    await scorer.ascore([[2, 100000]], [1])
        await assert_nothing_left(client, keys)
    assert letters(client, keys) == {}
    assert play.counter(client, keys, "cancelled") == 2


async def test_I8_a_wait_has_a_name_and_an_end_that_leaves_nothing(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    with buffering(config()), Scorer(config(), name="ref") as scorer:
        waiting = asyncio.create_task(scorer.ascore([[2, 3]] * 40, [1] * 40))
        await until(lambda: is_blocked(client, keys, "ref", ScoresPending, sequences=40, jobs=2))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(WaitTimeout, match=r"did not finish within 0\.1 s"):
            scorer.score([[2, 3]], [1], timeout_s=0.1)
        assert wait_of(client, keys, "ref") is None
        await assert_nothing_left(client, keys)
    assert play.counter(client, keys, "cancelled") == 3


async def test_results_that_nobody_comes_for_are_retired(
    client: redis.Redis, keys: Keys, config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    asked = score_jobs.make_job("score-gone/0/0", [score_jobs.Given([2, 3, 4], 1)])
    play.admit(client, keys, [asked], lane="score", source="score:gone")
    async with working(config()):
        await until(all_in(client, keys, [asked.id], "ready"))
    with buffering(config(buffer={"score_ttl_s": 0.01})):
        await assert_nothing_left(client, keys)
    assert play.counter(client, keys, "retired") == 1


def test_I1_only_ready_groups_of_a_lane_that_nobody_subscribed_to_are_collected(
    client: redis.Redis, keys: Keys
) -> None:
    play.admit(client, keys, [play.job(0, n=1, dataset="s"), play.job(1, n=1, dataset="s")], lane="score", source="s")
    play.admit(client, keys, [play.job(0, n=1)])

    def collect(name: str) -> str:
        return run(client, scripts.collect(keys, name, "score"))

    assert collect("s/0/0") == "queued"
    play.complete(client, keys, 3, n=1)
    assert collect("d/0/0") == "ready", "it is of another lane"
    assert [collect("s/0/0"), collect("s/0/0"), collect("s/0/9")] == ["retired", "", ""]
    play.assert_conserved(client, keys)
    play.subscribe(client, keys, "other", lanes="eval,score")
    assert collect("s/0/1") == "subscribed"
    run(client, scripts.unsubscribe(keys, "other"))
    assert collect("s/0/1") == "retired"
    assert (play.counter(client, keys, "retired"), play.counter(client, keys, "duplicated")) == (2, 0)
    play.assert_conserved(client, keys)


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_T6_scores_are_the_logprobs_of_sampling_and_survive_a_kill(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    models: list[Path],
    publications: list[Publication],
    engine_url: str,
    start: Start,
    tmp_path: Path,
) -> None:
    config = make_config(redis_server.url, keys, model_config, tmp_path, engine={"url": engine_url})
    publish(client, keys, publications[1])
    jobs = admit(client, keys, [job(i, "abcd"[i % 4], sampling={"max_new_tokens": 100}) for i in range(8)])
    async with working(config):
        await until(all_in(client, keys, jobs, "ready"))
    drawn = [payload for name in jobs for _, payload in read_group(client, keys, name)]
    sequences, starts = [one.tokens.tolist() for one in drawn], [one.prompt_length for one in drawn]

    with buffering(config), Scorer(config) as scorer:
        async with working(config):
            of_first = await scorer.ascore(sequences, starts, timeout_s=60)
        for one, payload in zip(of_first, drawn, strict=True):
            assert one.version == 1
            np.testing.assert_allclose(one.logprobs, payload.logprobs[payload.prompt_length :], atol=1e-4)

        # Another version, and the worker that holds the jobs dies: they are scored elsewhere, once, under the new one.
        publish(client, keys, publications[2])
        many, begins = sequences * 40, starts * 40
        worker = start(config, "killed")
        asked = asyncio.create_task(scorer.ascore(many, begins, timeout_s=120))
        before = play.counter(client, keys, "committed")
        await until(lambda: play.counter(client, keys, "committed") > before + 20)
        gone = open_pidfds([worker.pid])
        worker.signal(signal.SIGKILL)
        # Until it is gone it may lease another job.
        assert wait_gone(gone, 60) == []
        killed = lease_tokens(client, keys)
        async with tended(client, keys), working(config, "next"):
            of_second = await asked
        assert play.counter(client, keys, "crashes") > 0
        assert play.counter(client, keys, "committed") == before + len(many)
        await assert_nothing_left_of_scores(client, keys, jobs, killed)
    model = {2: oracle.load_model(models[2])}
    for i, one in enumerate(of_second):
        assert one.version == 2
        np.testing.assert_allclose(one.logprobs, of_second[i % len(drawn)].logprobs, atol=1e-4)
    for one, tokens, begin in zip(of_second[: len(drawn)], sequences, starts, strict=True):
        sample = Sample(Job("s/0/0", 1), 0, tokens=tokens)
        expected = oracle.recompute(model, sample, [-1] * begin + [2] * (len(tokens) - begin), 1.0)
        np.testing.assert_allclose(one.logprobs, expected[begin:], atol=1e-4)


async def assert_nothing_left_of_scores(
    client: redis.Redis, keys: Keys, others: list[str], killed: Set[str] = frozenset()
) -> None:
    await assert_nothing_left(client, keys, killed)
    assert sorted(name.decode() for name in client.zrange(keys.ready, 0, -1)) == sorted(others)


def test_the_public_name(client: redis.Redis, keys: Keys, config: Make) -> None:
    assert penstock.Scorer is Scorer
    assert penstock.score(config(), [[2, 3]], [2])[0].logprobs.shape == (0,)
