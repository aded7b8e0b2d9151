"""``penstock trace`` says the same of a job while it is in Redis and when its run is over."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.console.cli.main import execute
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.test_recorder import answer, config_of, recording, until, until_recorded

JOB = "d/0/0"


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return config_of(redis_server.url, keys, tmp_path)


def traced(config: Config, capsys: pytest.CaptureFixture[str], *where: str, of: str = JOB) -> Any:
    capsys.readouterr()
    assert execute(["trace", of, "--json", "--run", config.run, "--directory", str(config.directory), *where]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_is_followed_live_and_from_files_alone(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_of = "--redis", redis_server.url
    run(client, scripts.record(keys, "first", lease_ms=1, backlog=100, patience_ms=600_000))
    until(lambda: not client.exists(keys.recorder), "the lease of the first recorder to end")
    leader = play.lead(client, keys)
    play.subscribe(client, keys, gb=1)
    play.join(client, keys)
    play.admit(client, keys, [play.job(0)])
    (held,) = play.lease(client, keys, "w1", version=1)
    run(client, scripts.release(keys, JOB, held.token))
    (held,) = play.lease(client, keys, "w2", version=1)

    told = traced(config, capsys, *redis_of)
    assert (told["state"], told["samples"], told["batches"]) == ("leased", [], [])
    assert [(one["worker"], one["end"]) for one in told["tries"]] == [("w1", "released"), ("w2", "")]

    run(client, scripts.crash(keys, JOB, held.token, "w2", "killed"))
    (held,) = play.lease(client, keys, "w1", version=1)
    answer(client, keys, held)
    play.keep(client, keys, leader, [JOB])
    assert play.cut(client, keys, leader, 1, [JOB]).outcome == "cut"

    live = traced(config, capsys, *redis_of)
    assert (live["state"], live["crashes"]) == ("ready", 1)
    ends = [("w1", "released", "train"), ("w2", "crashed", "resume"), ("w1", "committed", "resume")]
    assert [(one["worker"], one["end"], one["lane"]) for one in live["tries"]] == ends
    assert [(one["id"], one["reward"], one["try"]) for one in live["samples"]] == [
        (f"{JOB}/0", 0, 3),
        (f"{JOB}/1", 1, 3),
    ]
    ((cut_s, trained_s),) = [(one["cut_s"], one["trained_s"]) for one in live["batches"]]
    assert (cut_s >= live["ready_s"] > 0, trained_s) == (True, 0)

    play.commit_batch(client, keys, 1)
    run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1))
    assert play.seal(client, keys, leader, [JOB]) == [JOB]
    with recording(config):
        until_recorded(client, keys)
    assert run(client, scripts.sweep(keys, leader, [(JOB, 2)])) == 1

    for where in (redis_of, ()):  # the run's folder names no Redis
        over = traced(config, capsys, *where)
        assert over["state"] == "trained"
        assert over["tries"] == live["tries"]
        assert over["samples"][0]["committed_s"] == pytest.approx(live["samples"][0]["committed_s"], abs=1e-5)
        (batch,) = over["batches"]
        assert (batch["batch"], batch["cut_s"], batch["loss_tokens"]) == (1, pytest.approx(cut_s, abs=1e-5), 8)
        assert [one["event"] for one in over["events"]][-2:] == ["cut", "trained"]
    assert [one["job"] for one in traced(config, capsys, of="1")["jobs"]] == [JOB]
    assert [one["tries"] for one in traced(config, capsys, of="d/0")] == [3]
