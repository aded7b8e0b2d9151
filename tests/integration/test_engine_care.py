"""A worker whose engine is away, or keeps dying: what it says, what it holds, and how it comes back."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.console.cli.main import execute
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import EngineAway, EngineCrashLoop, EngineRestarting
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import (
    IDS,
    admit,
    all_in,
    is_blocked,
    job,
    make_config,
    metas,
    presence,
    publish,
    states,
    tended,
    until,
    working,
)

Make = Callable[..., Config]

#: Quick to lose patience.
QUICK = {"restart_wait_s": 0.01, "crash_loop_failures": 3, "health_interval_s": 0.1}


async def test_I9_an_external_engine_that_was_away_has_the_newest_weights_before_it_answers(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(i) for i in range(2)])
    # One that answers again is no failure, however often it was asked in vain.
    made = config(
        engine=QUICK | {"crash_loop_failures": 2, "health_timeout_s": 1.0}, worker={"lease_s": 1.0}, rollout={"n": 4}
    )
    async with working(made) as worker, tended(client, keys):
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: presence(client, keys)["engine"] == "sglang 0.5.20 (external)")
        assert presence(client, keys)["external"]
        fake.open.clear()
        held = admit(client, keys, [job(2, n=8), job(3, n=8)])
        await until(lambda: fake.num_running == 8)
        client.sadd(keys.paused, "resume", "suspect", "train")
        fake.is_away = True
        fake.die()
        await until(lambda: presence(client, keys)["state"] == "engine away")
        await until(lambda: is_blocked(client, keys, "engine", EngineAway, url=fake.url))
        await until(lambda: not worker.held, "for jobs that wait for an engine that is away to be handed back")
        assert presence(client, keys)["why"] == "", "an engine that is away is no crash loop"
        publish(client, keys, publications[2])
        fake.controls.clear()
        fake.asked.clear()
        fake.open.set()
        fake.is_away = False
        await until(lambda: presence(client, keys)["state"] == "serving")
        assert fake.asked.total() == 0, "nothing was asked before the weights were there"
        # It may have been frozen by whoever was lost: it ends unfrozen.
        assert fake.controls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        client.srem(keys.paused, "resume", "suspect", "train")
        await until(all_in(client, keys, held, "ready"))
    assert fake.loads == ["1", "2"]
    assert {meta.oldest for name in held for meta in metas(client, keys, name)} == {2}
    assert (play.counter(client, keys, "crashes"), play.counter(client, keys, "released")) == (1, 1)
    play.assert_conserved(client, keys)


async def test_an_engine_that_dies_of_everything_is_a_crash_loop_and_takes_nothing_until_it_serves(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    """It starts each time, so only what it does with a request tells; jobs must not pay for that."""
    async with working(config(engine=QUICK)), tended(client, keys):
        await until(lambda: presence(client, keys)["state"] == "serving")
        fake.behaviour = dict.fromkeys((0, *IDS.values()), "die")
        jobs = admit(client, keys, [job(i) for i in range(4)])
        await until(lambda: presence(client, keys)["state"] == "crash loop")
        proofs = fake.proofs
        await until(lambda: fake.proofs >= proofs + 3)
        assert play.counter(client, keys, "crashes") == 4, "each job paid for the first death and for no other"
        assert set(states(client, keys, jobs)) == {"queued"}
        await until(lambda: is_blocked(client, keys, "intake", EngineRestarting, error=" "))
        fake.behaviour.clear()
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: presence(client, keys)["state"] == "serving")
        await until(lambda: presence(client, keys)["why"] == "")
    assert not client.xlen(keys.dead)
    play.assert_conserved(client, keys)


#: An interpreter whose SGLang has the arguments of an empty command line, and dies at its start.
_PYTHON = """#!/bin/bash
case "$3" in
  *add_cli_args*) echo 'penstock-arguments: {arguments}'; exit;;
  *penstock-arguments*) echo "penstock-arguments: 0.5.20 {folder} 1"; exit;;
esac
echo x >> {folder}/starts
if [ -e {folder}/mended ]; then exec {python} -m tests.integration.fake_engine "$@"; fi
echo loading; echo "torch.OutOfMemoryError: not enough memory for {folder}"; exit 3
"""


async def test_a_crash_loop_of_starts_is_a_published_state_and_ends_when_the_operator_mends_it(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = tmp_path / "python"
    arguments = json.dumps([[["device"], "one", "str", []], [["incremental-streaming-output"], "nothing", "", []]])
    python.write_text(_PYTHON.format(folder=tmp_path, python=sys.executable, arguments=arguments))
    python.chmod(0o755)
    # The engine does not get our PYTHONPATH; its release has no argument of a preset but the device.
    engine = {"python": str(python), "args": {"device": "cpu"}, "env": {"PYTHONPATH": os.getcwd()}} | QUICK
    publish(client, keys, publications[1])
    jobs = admit(client, keys, [job(0)])
    said: dict[str, Any] = {}
    async with working(make_config(redis_server.url, keys, model_config, tmp_path, engine=engine)):
        await until(lambda: presence(client, keys)["state"] == "crash loop")
        assert "not enough memory" in presence(client, keys)["why"]
        loop = partial(is_blocked, client, keys, "engine", EngineCrashLoop, window_s=600.0, retry_s=0.3)
        await until(lambda: loop(error="not enough memory"))
        assert states(client, keys, jobs) == ["queued"]
        for command in (("workers", "ls"), ("status",), ("why",)):
            assert execute([*command, "--run", keys.run, "--redis", redis_server.url]) == 0
            said[command[0]] = capsys.readouterr().out
        (tmp_path / "mended").touch()
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: (presence(client, keys)["state"], presence(client, keys)["why"]) == ("serving", ""))
    assert all("not enough memory" in text for text in said.values()), json.dumps(said)
    assert metas(client, keys, jobs[0])[0].newest == 1
    assert play.counter(client, keys, "crashes") == 0
    play.assert_conserved(client, keys)
