"""Seeds on a GPU: the same configuration draws the same tokens, whatever runs beside a sample; another seed others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import ModelConfig
from penstock.keys import Keys
from penstock.redis_server import RedisServer
from tests.gpu.conftest import SHAPE, serving
from tests.integration.seeded_play import NUM_JOBS, draw
from tests.tiny_model import publication_of


@pytest.fixture(scope="module")
def seeded_engine(gpu_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that draws by seeds."""
    folder = tmp_path_factory.mktemp("seeded-engine")
    with serving(gpu_models[1], folder, **{"enable-deterministic-inference": True}) as url:
        yield url


@pytest.mark.timeout(900)
async def test_the_same_configuration_draws_the_same_tokens_and_another_seed_others(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    gpu_models: list[Path],
    seeded_engine: str,
    tmp_path: Path,
) -> None:
    async def drawn(run: str, seed: int, **sections: dict[str, Any]) -> list[list[int]]:
        own = Keys(f"{keys.run}-{run}")
        model = ModelConfig(path=str(gpu_models[1]), dtype=SHAPE.dtype)
        publication = publication_of(gpu_models[1], 1)
        return await draw(
            client, redis_server.url, own, model, publication, tmp_path / run,
            engine_url=seeded_engine, seed=seed, **sections,
        )  # fmt: skip

    first = await drawn("first", 7)
    assert await drawn("again", 7) == first
    # Other samples beside each, other sizes of what is computed at once.
    assert await drawn("alone", 7, worker={"slots": 2}) == first
    other = await drawn("other", 8)
    assert not any(a == b for a, b in zip(other, first, strict=True))
    assert len({tuple(tokens) for tokens in first}) == len(first) == 2 * NUM_JOBS, "answers of a group differ too"
