"""Leases and the event loop of their worker: a busy loop loses none, one that stands still loses all, by name."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import EventLoopStuck
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import fake
from tests.integration.worker_play import admit, all_in, job, make_config, publish, tended, until, wait_of
from tests.integration.worker_process import Start, start

__all__ = ["fake", "start"]

LEASE_S = 4.0


@pytest.fixture
def go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lets the reward which holds the loop come to its end."""
    path = tmp_path / "go on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(path))
    return path


def let_go(path: Path) -> None:
    path.touch()


@pytest.fixture
def config(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, fake: FakeEngine, tmp_path: Path
) -> Callable[..., Config]:
    def make(**worker: Any) -> Config:
        return make_config(
            redis_server.url,
            keys,
            model_config,
            tmp_path,
            engine={"url": fake.url},
            worker={"lease_s": LEASE_S, "heartbeat_s": 0.5} | worker,
            reward={"function": "tests.integration.worker_parts:holds_the_loop", "timeout_s": 300.0},
        )

    return make


@pytest.fixture
def holding(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    config: Callable[..., Config],
    start: Start,
    go_on: Path,
) -> Callable[..., AbstractAsyncContextManager[list[str]]]:
    """A worker whose loop a reward holds, for a block that is given its jobs; behind it they become ready."""

    @asynccontextmanager
    async def hold(**over: float) -> AsyncIterator[list[str]]:
        publish(client, keys, publications[1])
        jobs = admit(client, keys, [job(0)])
        async with tended(client, keys, lease_ms=int(LEASE_S * 1000)):
            worker = start(config(**over))
            await until(go_on.with_suffix(".began").exists, worker.text())
            yield jobs
            let_go(go_on)
            await until(all_in(client, keys, jobs, "ready"), worker.text())
            await until(lambda: not wait_of(client, keys, "loop"))

    return hold


async def test_I1_a_worker_whose_loop_is_busy_keeps_its_leases(
    client: redis.Redis, keys: Keys, holding: Callable[..., AbstractAsyncContextManager[list[str]]]
) -> None:
    async with holding() as jobs:
        over = time.monotonic() + 1.5 * LEASE_S
        await until(lambda: time.monotonic() > over)
        assert play.state(client, keys, jobs[0]) == "leased"
        assert play.counter(client, keys, "reclaimed") == 0


async def test_I8_a_loop_that_stands_still_gives_its_jobs_up_and_names_the_line(
    client: redis.Redis, keys: Keys, holding: Callable[..., AbstractAsyncContextManager[list[str]]]
) -> None:
    async with holding(stuck_s=1.0) as jobs:
        await until(all_in(client, keys, jobs, "queued"), "for the lease to run out")
        stuck = await until(lambda: wait_of(client, keys, "loop"))
        assert isinstance(stuck, EventLoopStuck)
        assert ("worker_parts.py" in stuck.place, "(_wait_for_the_test)" in stuck.place) == (True, True)
    assert play.counter(client, keys, "duplicated") == 0
    play.assert_conserved(client, keys)
