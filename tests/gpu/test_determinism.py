"""Seeds on a GPU: the same configuration draws the same tokens, whatever runs beside a sample; another seed others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import ModelConfig
from penstock.keys import Keys
from penstock.redis_server import RedisServer
from tests.gpu.conftest import SHAPE, serving
from tests.integration import worker_play
from tests.integration.worker_play import admit, all_in, job, publish, read_group, until, working
from tests.tiny_model import publication_of

NUM_JOBS = 8
NEW_TOKENS = 96


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
    def drawn(run: str, seed: int, slots: int) -> list[list[int]]:
        """Tokens of every sample of a run of its own, in the order of the ids."""
        own = Keys(f"{keys.run}-{run}")
        config = worker_play.make_config(
            redis_server.url,
            own,
            ModelConfig(path=str(gpu_models[1]), dtype=SHAPE.dtype),
            tmp_path,
            engine={"url": seeded_engine},
            worker={"slots": slots},
            rollout={"sampling": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}},
        ).model_copy(update={"seed": seed})

        async def play() -> None:
            publish(client, own, publication_of(gpu_models[1], 1))
            jobs = admit(
                client, own, [job(i, prompt=None, prompt_ids=[5, 6, 7, 8 + i % 3, 9 + i]) for i in range(NUM_JOBS)]
            )
            async with working(config) as worker:
                await until(all_in(client, own, jobs, "ready"), limit_s=120)
                assert worker.services.engine.deterministic

        asyncio.run(play())
        groups = [read_group(client, own, f"d/0/{i}") for i in range(NUM_JOBS)]
        return [payload.tokens.tolist() for rows in groups for _, payload in rows]

    first, again = drawn("first", 7, 8), drawn("again", 7, 8)
    assert again == first
    # Other samples beside each, other sizes of what is computed at once.
    assert drawn("alone", 7, 2) == first
    other = drawn("other", 8, 8)
    assert sum(a == b for a, b in zip(other, first, strict=True)) == 0
    assert len({tuple(tokens) for tokens in first}) == len(first) == 2 * NUM_JOBS, "answers of a group differ too"
