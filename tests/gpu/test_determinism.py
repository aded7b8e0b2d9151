"""Seeds on a GPU: the same configuration draws the same tokens, whatever runs beside a sample; another seed others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import ModelConfig
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.gpu.conftest import SHAPE, serving
from tests.integration.seeded_play import SeededRuns
from tests.tiny_model import publication_of


@pytest.fixture(scope="module")
def seeded_engine(gpu_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that draws by seeds."""
    folder = tmp_path_factory.mktemp("seeded-engine")
    with serving(gpu_models[1], folder, **{"enable-deterministic-inference": True}) as url:
        yield url


@pytest.mark.timeout(900)
def test_the_same_configuration_draws_the_same_tokens_and_another_seed_others(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    gpu_models: list[Path],
    seeded_engine: str,
    tmp_path: Path,
) -> None:
    model = ModelConfig(path=str(gpu_models[1]), dtype=SHAPE.dtype)
    publication = publication_of(gpu_models[1], 1)
    runs = SeededRuns(client, redis_server.url, keys, model, publication, seeded_engine, tmp_path)

    async def body() -> None:
        first = await runs.assert_seeds_decide()
        # Taken up again and again from its prefix.
        assert await runs.draw("again", 7, rollout={"lease_tokens": 20}) == first

    asyncio.run(body())
