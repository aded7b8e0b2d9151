"""A fleet that is gone at once: every lease of it comes back in one look."""

import time
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import make_config, until

__all__ = ["start_part"]

WORKERS, JOBS = 64, 6400


@pytest.fixture
def made(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path, worker={"lease_s": 6.0, "heartbeat_s": 1.0})


def preempt(client: redis.Redis, keys: Keys) -> None:
    """Every job is leased by one of many workers, none of which says anything any more."""
    for start in range(0, JOBS, 400):
        play.admit(client, keys, [play.job(i) for i in range(start, start + 400)])
    for worker in range(WORKERS):
        assert len(play.lease(client, keys, f"w{worker}", JOBS // WORKERS)) == JOBS // WORKERS


def test_a_preempted_fleet_of_6400_leases_is_back_in_one_look(
    client: redis.Redis, keys: Keys, made: Config, start_part: StartPart
) -> None:
    """A look every second that took 100 of a lane back would need more than a minute."""
    preempt(client, keys)
    buffer = start_part("buffer", made)
    until(lambda: play.counter(client, keys, "reclaimed") > 0, "the first lease to be taken back", 120)
    began = time.monotonic()
    until(lambda: play.counter(client, keys, "reclaimed") == JOBS, "all of them", 20)
    print(f"all {JOBS} leases were back {time.monotonic() - began:.2f} s after the first")
    assert client.xlen(keys.jobs("resume")) == JOBS
    assert buffer.process.poll() is None
    until(lambda: f"{JOBS // WORKERS} jobs of worker w0" in buffer.text())
    assert len(play.lease(client, keys, "new", JOBS)) == JOBS
    assert audit(client, keys).ok


def test_retries_that_are_due_together_are_queued_together(
    client: redis.Redis, keys: Keys, made: Config, start_part: StartPart
) -> None:
    count = 8000
    play.admit(client, keys, [play.job(i) for i in range(count)])
    for held in play.lease(client, keys, most=count):
        fail = scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=9, retry_ms=0)
        run(client, fail)
    assert client.zcard(keys.delayed) == count
    start_part("buffer", made)
    until(lambda: client.zcard(keys.delayed) < count, "the first retry", 120)
    until(lambda: client.zcard(keys.delayed) == 0, "all of them", 15)
    assert client.xlen(keys.jobs("train")) == count
