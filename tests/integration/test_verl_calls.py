"""Calls of verl's server side by side, on a real buffer: a full Redis, callers that go. The worker's part is played."""

import asyncio
import importlib
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.adapters.inside_verl.sampling import LANE
from penstock.consumers.adapters.prompts import Prompts, Request
from penstock.errors import ConfigError
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, Player, buffering, make_config, make_sample, publish
from tests.integration.test_asking import lease

SAID = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
SAMPLING = SAID | {LANE: "train"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The adapter, with the one class of verl's that it makes: verl itself is in an environment of its own."""
    name = ""
    for part in ("verl", "workers", "rollout", "replica"):
        name = f"{name}.{part}".strip(".")
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].TokenOutput = lambda **given: types.SimpleNamespace(**{"extra_fields": {}} | given)  # type: ignore[attr-defined]
    yield importlib.import_module("penstock.consumers.adapters.verl_server")
    del sys.modules["penstock.consumers.adapters.verl_server"]


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Iterator[Config]:
    config = make_config(redis_server.url, keys.run, tmp_path)
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    with buffering(config):
        yield config


def serve(module: ModuleType, tmp_path: Path, **more: Any) -> Any:
    settings = module.settings_of({"penstock": {"config": str(tmp_path / "run.yaml")} | more})
    return module.PenstockServer(settings, prompt_length=64, response_length=32, temperature=1.0)


class Held:
    """A call during which the server's thread does nothing else, until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, future: Future[Any]) -> None:
        self.entered.set()
        self.go.wait(PATIENCE_S)
        future.set_result(None)


def within(body: Callable[[], Awaitable[None]]) -> None:
    """Run ``body``, which must end: a call that nobody answers hangs."""

    async def bounded() -> None:
        await asyncio.wait_for(body(), 2 * PATIENCE_S)

    asyncio.run(bounded())


def test_a_call_that_redis_has_no_room_for_waits_alone(
    config: Config,
    client: redis.Redis,
    keys: Keys,
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, full, admit = Player(client, keys), threading.Event(), Prompts.admit_now
    refused = threading.Event()

    def admit_now(prompts: Prompts, requests: Sequence[Request]) -> list[str] | None:
        if full.is_set():
            refused.set()
            return None
        return admit(prompts, requests)

    monkeypatch.setattr(Prompts, "admit_now", admit_now)

    async def body() -> None:
        server = serve(module, tmp_path)
        await server.where(0)
        await server._call(lambda future: future.set_result(publish(server._lanes["train"])))
        first, second = (asyncio.create_task(server.generate([1, 2, 3], SAMPLING)) for _ in range(2))
        leases = await asyncio.to_thread(lease, worker, 2)
        full.set()
        third, fourth = (asyncio.create_task(server.generate([4, token], SAMPLING)) for token in (5, 6))
        await asyncio.to_thread(refused.wait, PATIENCE_S)
        worker.answer(leases[0], [1])
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        await server.abort_all_requests()
        outputs = [await one for one in (first, second, third, fourth)]
        assert [one.stop_reason for one in outputs].count("aborted") == 3
        full.clear()
        assert await asyncio.to_thread(lambda: play.counter(client, keys, "admitted")) == 2, "what was aborted"
        full.set()
        again = [asyncio.create_task(server.generate([7, token], SAMPLING)) for token in (8, 9)]
        refused.clear()
        await asyncio.to_thread(refused.wait, PATIENCE_S)
        full.clear()
        for one in await asyncio.to_thread(lease, worker, 2):
            worker.answer(one, [1])
        outputs = await asyncio.gather(*again)
        assert all(one.token_ids for one in outputs)

    within(body)


def test_callers_that_go_take_nobody_with_them(
    config: Config, client: redis.Redis, keys: Keys, module: ModuleType, tmp_path: Path
) -> None:
    held = Held()

    async def body() -> None:
        server = serve(module, tmp_path)
        await server.where(0)
        running = asyncio.create_task(server._call(held))
        await asyncio.to_thread(held.entered.wait, PATIENCE_S)
        queued = asyncio.create_task(server.generate([1, 2], SAMPLING))
        await asyncio.sleep(0)  # it is asked for
        for one in (running, queued):
            one.cancel()
        await asyncio.wait([running, queued])
        held.go.set()
        await server.abort_all_requests()
        assert server._lanes["train"].num_live == 0, "what nobody waits for is not asked"

    try:
        within(body)
    finally:
        held.go.set()


def test_lanes_are_as_verl_says_and_training_is_what_it_takes_it_for(
    config: Config, client: redis.Redis, keys: Keys, module: ModuleType, tmp_path: Path
) -> None:
    worker = Player(client, keys)
    refused = [
        (SAID, "is not said, for its sampling_params have no penstock_lane"),
        (SAMPLING | {"temperature": 0.7}, r"temperature 0\.7 in training, and verl divides by .*, 1: ask"),
        (SAMPLING | {"top_p": 0.9}, r"top_p 0\.9 draws from another distribution"),
        (SAMPLING | {"bad_words": ["x"]}, "bad_words is not a sampling parameter"),
    ]

    async def body() -> None:
        server = serve(module, tmp_path)
        await server.where(0)
        await server._call(lambda future: future.set_result(publish(server._lanes["train"])))
        for said, why in refused:
            with pytest.raises(ConfigError, match=why):
                await server.generate([1, 2, 3], said)
        with pytest.raises(ConfigError, match="asks verl's server for kv_transfer_params"):
            await server.generate([1, 2, 3], SAMPLING, kv_transfer_params={})
        asked = [
            server.generate([1, 2, 3], SAMPLING | {"stop": "###", "stop_token_ids": [7]}, label=[1]),
            server.generate([1, 2, 3], SAID | {LANE: "eval"}),
            server.generate([1, 2, 3], SAID | {LANE: "eval", "temperature": 0.7, "top_p": 0.9, "min_tokens": 2}),
        ]
        tasks = [asyncio.create_task(one) for one in asked]
        jobs = []
        for one in await asyncio.to_thread(lease, worker, 3):
            jobs.append(Job.from_bytes(one.body))
            worker.answer(one, [1])
        await asyncio.wait(tasks)
        found = sorted((job.lane, sorted(job.sampling.items()), job.raw_label) for job in jobs)
        assert found == [
            ("eval", [("max_new_tokens", 32), ("min_new_tokens", 2), ("temperature", 0.7), ("top_p", 0.9)], ""),
            ("eval", [("max_new_tokens", 32), ("temperature", 1.0)], ""),
            ("train", [("max_new_tokens", 32), ("stop", ["###"]), ("stop_token_ids", [7]), ("temperature", 1.0)], [1]),
        ]

    within(body)


def test_turns_and_what_the_reward_said_reach_verl(
    config: Config, client: redis.Redis, keys: Keys, module: ModuleType, tmp_path: Path
) -> None:
    worker = Player(client, keys)

    async def body() -> None:
        server = serve(module, tmp_path, reward_info=["acc", "pred"])
        await server.where(0)
        await server._call(lambda future: future.set_result(publish(server._lanes["train"])))
        first, second = (asyncio.create_task(server.generate([1, 2, 3], SAMPLING)) for _ in range(2))
        [held, _] = await asyncio.to_thread(lease, worker, 2)
        sample = make_sample(Job.from_bytes(held.body), 0, [1], 4)
        sample.num_turns, sample.reward_info = 3, {"acc": True, "long": [1, 2]}
        assert worker.commit(held, [sample], 1).outcome == "ready"
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        await server.abort_all_requests()
        found = {output.stop_reason: output.extra_fields for output in (await first, await second)}
        assert found["completed"]["penstock_turns"] == 3
        assert found["completed"]["penstock_reward_info"] == {"acc": True, "pred": None}
        assert found["aborted"]["penstock_reward_info"] == {"acc": None, "pred": None}, "verl needs all of all"

    within(body)
