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

from consumers.adapters.prompts import Prompts, Request
from penstock.config import Config
from penstock.protocol.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, Player, buffering, make_config, publish
from tests.integration.test_asking import lease

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The adapter, with the one class of verl's that it makes: verl itself is in an environment of its own."""
    name = ""
    for part in ("verl", "workers", "rollout", "replica"):
        name = f"{name}.{part}".strip(".")
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].TokenOutput = lambda **given: types.SimpleNamespace(**{"extra_fields": {}} | given)  # type: ignore[attr-defined]
    yield importlib.import_module("consumers.adapters.verl_server")
    del sys.modules["consumers.adapters.verl_server"]


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Iterator[Config]:
    config = make_config(redis_server.url, keys.run, tmp_path)
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    with buffering(config):
        yield config


def serve(module: ModuleType, tmp_path: Path) -> Any:
    settings = {"config": str(tmp_path / "run.yaml"), "run": None, "name": "verl"}
    return module.PenstockServer(settings, prompt_length=64, response_length=32, sampling=SAMPLING)


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
