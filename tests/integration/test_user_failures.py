"""A reward that raises on everything stops admission after some twenty jobs, by name; the log does not overflow.

Producer and worker are processes of their own, Redis is real.
"""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import redis
from typer.testing import CliRunner

from penstock.config import RewardConfig
from penstock.console.cli.main import app
from penstock.protocol import user_failures
from penstock.records.causes import JobsFailing
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.parts import matches, waits
from tests.integration.saved import saved
from tests.integration.worker_play import tended, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

REWARD = "tests.integration.user_code_parts:unwritable"


def _producer(path: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "penstock.cli", "producer", "--config", str(path)]
    return subprocess.Popen(argv, stdout=log, stderr=log)


async def test_I8_a_reward_that_raises_on_everything_stops_admission_and_why_says_so(
    client: redis.Redis, keys: Keys, config: Make, start: Start, redis_server: RedisServer, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"a{i}=", "label": "x"}) for i in range(1000)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    made = config(
        reward={"function": REWARD, "max_attempts": 2},
        worker={"max_attempts": 1, "slots": 16},
        data={"train": [{"name": "d", "path": str(tmp_path / "d.jsonl")}]},
        rollout={"n": 1},
    )
    play.subscribe(client, keys, bound=0, gb=32)
    worker = start(made)
    path = saved(made, tmp_path / "producer.yaml")
    with (tmp_path / "producer.log").open("wb") as log, contextlib.ExitStack() as stack:
        producer = _producer(path, log)
        stack.callback(producer.wait)
        stack.callback(producer.kill)
        async with tended(client, keys, lease_ms=60_000):
            await until(lambda: matches(waits(client, keys).get("producer"), JobsFailing))
            admitted = play.counter(client, keys, "admitted")
            await until(lambda: play.counter(client, keys, "buried") == admitted, "for what is queued to end")
            assert play.counter(client, keys, "admitted") == admitted, "nothing more was admitted"
        assert 20 <= admitted <= 32 + 20 + 16 + 128, "a gate's worth and what ended until it was told"
        told = CliRunner().invoke(app, ["why", "--run", keys.run, "--redis", redis_server.url]).output
        assert f"jobs of dataset d with reward {REWARD} failed because of it" in " ".join(told.split()), told
        assert "ValueError: a\\ud800b" in told
        text = worker.text()
        assert 1 <= text.count("Traceback (most recent call last)") <= 12, "each kind of entry once a minute"
        assert producer.poll() is None, "it waits"
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0


def test_the_share_counts_from_20_jobs_on_for_each_kind_by_itself() -> None:
    config = RewardConfig()
    assert user_failures.judge({b"d:a": b"1" * 19}, config) is None
    found = user_failures.judge({b"d:a": b"1" * 20, b"w:a": b"why"}, config)
    assert found == JobsFailing("a", 20, 20, 0, config.max_died_share, "why")
    assert user_failures.judge({b"d:a": b"1" * 20 + b"0" * 80}, config) is None, "20 of 100 are not more than 0.2"
    assert matches(user_failures.judge({b"d:a": b"1" * 21 + b"0" * 79}, config), JobsFailing, failed=21, jobs=100)
    assert user_failures.judge({b"d:a": b"1" * 10, b"d:b": b"1" * 10}, config) is None


def test_refused_jobs_stop_admission_only_where_there_are_no_others() -> None:
    config = RewardConfig()
    refused = {b"d:a": b"2" * 20, b"w:a": b"its prompt has 5 tokens"}
    found = user_failures.judge(refused, config)
    assert matches(found, JobsFailing, code="a", failed=0, refused=20, error="its prompt has 5")
    assert user_failures.judge({b"d:a": b"2" * 19}, config) is None
    assert user_failures.judge({b"d:a": b"2" * 99 + b"0"}, config) is None, "some of the prompts do fit"
    assert user_failures.judge(refused, RewardConfig(max_died_share=1)) is None, "never, as it says"
    assert [user_failures.digit_of(one) for one in ("", "refused", "reward_raised", "engine_error")] == list("0210")


async def test_I8_prompts_longer_than_the_context_do_not_burn_the_data_without_end(
    client: redis.Redis, keys: Keys, config: Make, start: Start, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"a{i}=", "label": "x"}) for i in range(50)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    made = config(
        data={"train": [{"name": "d", "path": str(tmp_path / "d.jsonl")}]},
        rollout={"n": 1, "max_context_tokens": 2, "sampling": {"max_new_tokens": 2, "temperature": 1.0}},
    )
    play.subscribe(client, keys, bound=0, gb=32)
    start(made)
    path = saved(made, tmp_path / "producer.yaml")
    with (tmp_path / "producer.log").open("wb") as log, contextlib.ExitStack() as stack:
        producer = _producer(path, log)
        stack.callback(producer.wait)
        stack.callback(producer.kill)
        async with tended(client, keys, lease_ms=60_000):
            too_long = {"failed": 0, "error": "rollout.max_context_tokens"}
            await until(lambda: matches(waits(client, keys).get("producer"), JobsFailing, **too_long))
