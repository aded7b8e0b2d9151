"""A fleet as a process (``penstock fleet up``), engines for it, and what it shows of itself."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from penstock.config import ModelConfig
from penstock.records.codec import unpack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration.fake_engine import FakeEngine
from tests.integration.saved import saved
from tests.integration.worker_play import make_config


class FleetProcess:
    """``penstock fleet up``."""

    def __init__(self, config: Path, log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", "fleet", "up", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def text(self) -> str:
        return self.log.read_text()


Start = Callable[..., FleetProcess]


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeEngine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine().up()) for _ in range(2)]


@pytest.fixture
def start(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Iterator[Start]:
    started: list[FleetProcess] = []

    def make(fleet: dict[str, Any], **sections: Any) -> FleetProcess:
        config = make_config(redis_server.url, keys, model_config, tmp_path, fleet=fleet, **sections)
        path = saved(config, tmp_path / "fleet.yaml")
        started.append(FleetProcess(path, tmp_path / "fleet.log"))
        return started[-1]

    yield make
    for fleet in started:
        with contextlib.suppress(ProcessLookupError):
            fleet.process.kill()
        fleet.process.wait()


def external(*urls: str, **over: Any) -> dict[str, Any]:
    return {"models": [{"name": "policy", "server_groups": [{"name": "rollout", "urls": list(urls)}]}]} | over


async def answers(url: str) -> None:
    """Wait until a model answers there."""
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}, "rid": "r"}
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url + "/generate", json=body) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


def shown(client: redis.Redis, keys: Keys) -> dict[str, Any]:
    data = client.hget(keys.fleet, "state")
    return unpack(data, "state") if data else {"processes": [], "groups": {}}


def processes(client: redis.Redis, keys: Keys) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in shown(client, keys)["processes"]}


def present(client: redis.Redis, keys: Keys) -> set[str]:
    return {name.decode().rsplit(".", 1)[0] for name in client.hkeys(keys.workers)}


def records(client: redis.Redis, keys: Keys) -> dict[str, dict[str, Any]]:
    """Presence of every worker by the name it was started with."""
    found = (unpack(raw, "presence") for raw in client.hvals(keys.workers))
    return {one["name"].rsplit(".", 1)[0]: one for one in found}


def living(client: redis.Redis, keys: Keys) -> set[bytes]:
    """Full names of the workers whose processes the fleet shows."""
    pids = {one["pid"] for one in processes(client, keys).values()}
    return {name for name, raw in client.hgetall(keys.workers).items() if unpack(raw, "presence")["pid"] in pids}
