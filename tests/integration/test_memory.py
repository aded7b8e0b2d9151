"""GPU memory given up and taken back, by a real CPU server that goes through the motions; versions that are pinned."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from penstock.config import Config, ModelConfig
from penstock.console.cli.inspect import register
from penstock.console.cli.main import app
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, PublishError, WaitTimeout
from penstock.records.keys import Keys
from penstock.records.worker_causes import MemoryOffloaded
from penstock.redis.server import RedisServer
from tests.integration import worker_play
from tests.integration.test_transfers import expected, load
from tests.integration.worker_play import admit, all_in, is_blocked, job, presence, until, working

PROMPT = [5, 6, 7, 8, 9, 20, 33]
LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Callable[..., Config]:
    def make(**sections: Any) -> Config:
        sections["trainer"] = {"batch_groups": 1, "keep_versions": 2} | sections.pop("trainer", {})
        return worker_play.make_config(redis_server.url, keys, model_config, tmp_path, **sections)

    return make


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("apply", ["abort", "drain"])
async def test_memory_goes_and_comes_back_with_the_newest_weights(
    make: Callable[..., Config], client: redis.Redis, keys: Keys, models: list[Path], engine_url: str, apply: str
) -> None:
    """Running samples are safe, nothing is drawn meanwhile, and what was published meanwhile is served after it."""
    config = make(engine={"url": engine_url}, worker={"apply": apply})
    with Trainer(config) as trainer:

        async def publish(seed: int) -> int:
            again = {"run": config.run, "subscription": trainer.name, "batch": 0}
            await asyncio.to_thread(trainer.load_state_dict, again)
            return await asyncio.to_thread(trainer.publish, load(models[seed]))

        async with working(config) as worker:
            engine = worker.services.engine
            await publish(1)
            await until(lambda: presence(client, keys)["state"] == "serving")
            jobs = admit(client, keys, [job(index, sampling=LONG) for index in range(3)])
            await until(lambda: engine.num_running > 0)
            await asyncio.to_thread(trainer.offload_engines)
            assert presence(client, keys)["offloaded"] == ["cuda_graph", "kv_cache", "weights"]
            assert engine.num_running == 0
            assert worker.services.valves.requests.cause == MemoryOffloaded(by="trainer actor")
            late = admit(client, keys, [job(9)])
            version = await publish(2)
            # Back in two steps: weights first, and nobody draws before the last of it is there.
            await asyncio.to_thread(trainer.onload_engines, ["weights"])
            assert engine.version == version
            assert presence(client, keys)["state"] == "offloaded"
            assert engine.num_running == 0
            await asyncio.to_thread(trainer.onload_engines)
            await until(all_in(client, keys, jobs + late, "ready"))
            logprobs = (await engine.score(PROMPT, 3)).logprobs
            assert max(abs(a - b) for a, b in zip(logprobs, expected(models[2], PROMPT), strict=True)) < 1e-4
            assert worker.services.tally.engine_restarts == 0


@pytest.mark.engine
async def test_a_worker_that_comes_while_memory_is_offloaded_does_not_start_its_engine(
    make: Callable[..., Config], client: redis.Redis, keys: Keys, engine_url: str
) -> None:
    config = make(engine={"url": engine_url})
    with Trainer(config) as trainer:
        await asyncio.to_thread(trainer.offload_engines)
        async with working(config) as worker:
            await until(lambda: is_blocked(client, keys, "weights", MemoryOffloaded, by="trainer actor"))
            assert worker.services.engine.info.version == ""
            await asyncio.to_thread(trainer.onload_engines)
            await until(lambda: presence(client, keys)["state"] == "no weights")


def test_an_operator_offloads_and_onloads(
    make: Callable[..., Config], redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    config = make()
    register(app)
    arguments = ["--run", config.run, "--redis", redis_server.url, "--directory", str(config.directory)]
    for command, said in (
        (["offload", "--tags", "kv_cache"], "offloaded: kv_cache"),
        (["offload", "--tags", "weights"], "offloaded: weights, kv_cache"),
        (["onload"], "offloaded: nothing"),
    ):
        result = CliRunner().invoke(app, ["engines", *command, *arguments])
        assert said in result.output, result.output
    result = CliRunner().invoke(app, ["engines", "offload", "--tags", "ram", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "use weights, cuda_graph, kv_cache" in str(result.exception)
    assert len(client.xrange(keys.memory("policy"))) == 3


def test_a_worker_that_does_not_follow_is_named(make: Callable[..., Config], client: redis.Redis, keys: Keys) -> None:
    from penstock.protocol import scripts
    from penstock.records.codec import pack

    record = {"name": "w", "at": 1e12, "state": "serving", "why": "cannot give memory back", "version": 1}
    scripts.run(client, scripts.note(keys, keys.workers, "w", pack(record)))
    with Trainer(make()) as trainer, pytest.raises(WaitTimeout, match=r"Worker w \(cannot give memory back\) did not"):
        trainer.offload_engines(timeout=0.3)


def test_the_command_says_what_it_waits_for_while_it_waits(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.console.cli import engines as engines_cli
    from penstock.protocol import scripts
    from penstock.records.codec import pack

    monkeypatch.setattr(engines_cli, "MOMENT_S", 0.0)
    record = {"name": "w", "at": 1e12, "state": "serving", "why": "cannot give memory back", "version": 1}
    scripts.run(client, scripts.note(keys, keys.workers, "w", pack(record)))
    client.hset(keys.clock, "version:policy", 1)
    register(app)
    told = CliRunner().invoke(
        app, ["engines", "offload", "--timeout=0.3", "--run", keys.run, "--redis", redis_server.url]
    )

    assert told.output.count("waiting for worker w to follow") == 1, told.output
    assert "it reports: cannot give memory back" in " ".join(told.output.split())
    assert isinstance(told.exception, WaitTimeout)


def test_versions_that_are_held_or_pinned_are_kept(
    make: Callable[..., Config], client: redis.Redis, keys: Keys, models: list[Path]
) -> None:
    from penstock.protocol import scripts
    from penstock.records.codec import pack

    record = {"name": "w", "at": 1e12, "state": "serving", "version": 2}
    with Trainer(make()) as trainer:
        kept = []
        for version in range(1, 7):
            trainer.load_state_dict({"run": trainer.config.run, "subscription": trainer.name, "batch": 0})
            trainer.publish(load(models[version % 3]))
            if version == 1:
                trainer.pin(1, "eval")
            if version == 2:
                scripts.run(client, scripts.note(keys, keys.workers, "w", pack(record)))
            kept.append(sorted(int(folder.name[1:]) for folder in trainer.weights_dir.glob("v*")))
        assert kept[-1] == [1, 2, 5, 6]
        trainer.unpin("eval")
        trainer.load_state_dict({"run": trainer.config.run, "subscription": trainer.name, "batch": 0})
        trainer.publish(load(models[0]))
        assert sorted(int(folder.name[1:]) for folder in trainer.weights_dir.glob("v*")) == [2, 6, 7]
        with pytest.raises(PublishError, match="is no longer kept"):
            trainer.pin(4, "eval")
