"""Judges that classify behind a real router: it knows no /classify, and hands on what gives the same."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.config.fleet import MemberConfig, RouterConfig
from penstock.config.reward import JudgeConfig
from penstock.workers.rewards.judges import Judge
from penstock.workers.router.process import Router
from tests.integration.engine_fixtures import ENGINE_PYTHON, cpu_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class RewardModel:
    """Answers as SGLang does for a reward model of one number: how many characters, or ids, it was asked with."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.url = ""

    async def told(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model_path": "taste", "is_generation": False})

    async def embed(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.heard.append(asked)
        data = [{"object": "embedding", "index": 0, "embedding": [-float(len(asked["input"]))]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "data": data, "model": asked["model"], "usage": usage})


@pytest.fixture
async def models() -> AsyncIterator[list[RewardModel]]:
    async with AsyncExitStack() as stack:
        made = [RewardModel(), RewardModel()]
        for one in made:
            app = web.Application()
            app.router.add_get("/{path:.*}", one.told)
            app.router.add_post("/v1/embeddings", one.embed)
            server = await stack.enter_async_context(TestServer(app))
            one.url = str(server.make_url("")).rstrip("/")
        yield made


async def test_a_judge_behind_a_router_gives_the_numbers_of_its_engines(
    models: list[RewardModel], tmp_path: Path
) -> None:
    cpu_engine()  # skips where there is no environment of the engine
    config = RouterConfig.model_validate({
        "engines": [{"url": one.url} for one in models], "policy": "round_robin",
    })  # fmt: skip
    router = Router(config, ENGINE_PYTHON, name="taste", log_dir=tmp_path)
    await router.start()
    judge = Judge(JudgeConfig(name="taste", url=router.url, timeout_s=300, max_attempts=1))
    try:
        for one in models:
            await router.add(MemberConfig(url=one.url))
        found = [await judge.classify("x" * n) for n in (1, 2, 3)]
        ids = await judge.classify([5, 6, 7, 8])
    finally:
        await judge.close()
        await router.stop()
    assert (found, ids) == ([[-1.0], [-2.0], [-3.0]], [-4.0])
    assert [len(one.heard) for one in models] == [2, 2], "both are asked"
    assert models[1].heard[-1]["input"] == [5, 6, 7, 8] or models[0].heard[-1]["input"] == [5, 6, 7, 8]
