"""Seeds on a real engine: the same configuration draws the same tokens, wherever and however they are drawn."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import ModelConfig
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.engine_fixtures import cpu_engine, opened, up
from tests.integration.seeded_play import NUM_JOBS, SeededRuns


@pytest.fixture(scope="module")
def seeded_engine(model_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that draws by seeds."""
    config = opened(cpu_engine(**{"enable-deterministic-inference": True}))
    server = asyncio.run(up(config, model_config, tmp_path_factory.mktemp("seeded-engine")))
    yield server.url
    asyncio.run(server.stop())


async def test_the_same_configuration_draws_the_same_tokens_and_another_seed_others(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    seeded_engine: str,
    tmp_path: Path,
) -> None:
    runs = SeededRuns(client, redis_server.url, keys, model_config, publications[1], seeded_engine, tmp_path)
    first = await runs.assert_seeds_decide()
    # Taken up again and again from its prefix.
    assert await runs.draw("again", 7, rollout={"lease_tokens": 20}) == first
    assert play.counter(client, runs.keys_of("again"), "released") >= NUM_JOBS, "each was handed back"
