"""What a buffer serves of the queue it leads, and how Prometheus finds it."""

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import redis

from penstock.console.cli.main import execute
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import buffering, make_config, until


def fetched(url: str) -> set[str]:
    with urlopen(url, timeout=60) as answer:
        return set(answer.read().decode().splitlines())


def test_the_leader_serves_the_queue_and_is_found(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, metrics={"port": 0})
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(4)])
    _, buried = play.lease(client, keys, "w1", most=2, version=1)
    run(client, scripts.fail(keys, buried.job, buried.token, "w1", reason="reward_raised", detail="", max_attempts=0,
                             retry_ms=1))  # fmt: skip

    def discovered() -> Any:
        assert execute(["metrics", "discovery", "--run", keys.run, "--redis", redis_server.url]) == 0
        return json.loads(capsys.readouterr().out)

    with buffering(config) as buffer:
        assert buffer.metrics is not None
        url = buffer.metrics.url
        until(lambda: "penstock_buffer_leads 1.0" in fetched(url), "a leader")
        lines = fetched(url)
        (group,) = until(discovered, "a buffer that is shown")
    for line in (
        'penstock_queue_jobs{lane="train",state="queued"} 2.0',
        'penstock_queue_jobs{lane="train",state="leased"} 1.0',
        "penstock_queue_dead_letters 1.0",
        'penstock_queue_buried_jobs_total{reason="reward_raised"} 1.0',
        'penstock_queue_failed_tries_total{reason="reward_raised"} 1.0',
        "penstock_queue_admitted_jobs_total 4.0",
        'penstock_subscription_owned{subscription="actor"} 1.0',
        'penstock_queue_model_version{model="policy"} 1.0',
        "penstock_redis_takes_writes 1.0",
    ):
        assert line in lines
    assert any(line.startswith('penstock_gate_places{subscription="actor"}') for line in lines)
    assert 'penstock_queue_oldest_age_seconds{lane="eval"} 0.0' in lines
    assert group["labels"] == {"run": keys.run, "part": "buffer", "name": ""}
    assert url == f"http://{group['targets'][0]}/metrics"
    assert discovered() == [], "one that left as it should"


def test_a_file_for_prometheus_has_a_name_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["metrics", "discovery", "--out", str(tmp_path / "targets")]) == 2
    assert "Prometheus reads files that end in .json" in capsys.readouterr().err
