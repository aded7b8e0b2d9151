"""A fake engine, and workers that feed it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration import worker_parts
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import make_config, publish

Make = Callable[..., Config]


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().up() as engine:
        yield engine


@pytest.fixture
def config(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    fake: FakeEngine,
    tmp_path: Path,
) -> Make:
    """Makes configurations of workers of this test's run; version 1 is published."""
    worker_parts.scored.clear()
    worker_parts.groups.clear()
    publish(client, keys, publications[1])

    def make(**sections: Any) -> Config:
        engine = {"url": fake.url} | sections.pop("engine", {})
        model = sections.pop("model", model_config)
        return make_config(redis_server.url, keys, model, tmp_path, engine=engine, **sections)

    return make
