"""What tests on one GPU share: an engine of this very Python, and two policies to tell apart."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import ARGS, engine_env
from benchmarks.random_model import Shape, make_model
from penstock.config import Config, EngineConfig, ModelConfig
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.workers.sglang import server as servers
from tests.integration import worker_play

#: Heads of 64, which every attention kernel can do.
SHAPE = Shape(hidden=256, layers=2, heads=4, kv_heads=2, mlp=512, vocab=512, context=2048, dtype="bfloat16")
#: Spread of the weights: two seeds differ by whole units of log-probability.
SPREAD = 0.1
Make = Callable[..., Config]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no GPU, and CI has none"))


@pytest.fixture(scope="session")
def gpu_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("gpu-models")
    for seed in range(3):
        make_model(root / f"w{seed}", SHAPE, seed=seed, spread=SPREAD)
    return [root / f"w{seed}" for seed in range(3)]


@contextmanager
def serving(model: Path, log_dir: Path, **args: object) -> Iterator[str]:
    """Address of a server of this very Python on the first GPU, while the block runs."""
    settings = ARGS["cuda"] | {"mem-fraction-static": 0.3, "max-running-requests": 64} | args
    config = EngineConfig(python=sys.executable, args=settings, env=engine_env("cuda", sys.executable, {}))

    async def up() -> servers.Server:
        import aiohttp

        served = ModelConfig(path=str(model), dtype=SHAPE.dtype)
        async with aiohttp.ClientSession() as session:
            return await servers.start(
                lambda: servers.spawn(config, served, name="gpu", log_dir=log_dir), session, config.start_timeout_s
            )

    server = asyncio.run(up())
    try:
        yield server.url
    finally:
        asyncio.run(server.stop())


@pytest.fixture(scope="session")
def gpu_engine(gpu_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server on the first GPU that can give memory back."""
    with serving(gpu_models[0], tmp_path_factory.mktemp("gpu-engine"), **{"enable-memory-saver": True}) as url:
        yield url


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, gpu_models: list[Path], gpu_engine: str, tmp_path: Path) -> Make:
    """Makes configurations of a worker of that server; ``trainer`` settings are given, and sections beside them."""

    def make(sections: dict[str, Any] | None = None, **trainer: Any) -> Config:
        return worker_play.make_config(
            redis_server.url,
            keys,
            ModelConfig(path=str(gpu_models[0]), dtype=SHAPE.dtype),
            tmp_path,
            engine={"url": gpu_engine},
            trainer={"device": "cuda", "bucket_bytes": 1_000_000, "batch_groups": 1, **trainer},
            **(sections or {}),
        )

    return make
