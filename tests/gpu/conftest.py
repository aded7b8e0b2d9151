"""What tests on one GPU share: an engine of this very Python, and two policies to tell apart."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.engine import ARGS, engine_env
from benchmarks.random_model import Shape, make_model
from penstock.config import EngineConfig, ModelConfig
from workers import server as servers

#: Heads of 64, which every attention kernel can do.
SHAPE = Shape(hidden=256, layers=2, heads=4, kv_heads=2, mlp=512, vocab=512, context=2048, dtype="bfloat16")
#: Spread of the weights: two seeds differ by whole units of log-probability.
SPREAD = 0.1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture(scope="session")
def gpu_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("gpu-models")
    for seed in range(3):
        make_model(root / f"w{seed}", SHAPE, seed=seed, spread=SPREAD)
    return [root / f"w{seed}" for seed in range(3)]


@pytest.fixture(scope="session")
def gpu_engine(gpu_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server on the first GPU that can give memory back."""
    log_dir = tmp_path_factory.mktemp("gpu-engine")
    args = ARGS["cuda"] | {"enable-memory-saver": True, "mem-fraction-static": 0.3, "max-running-requests": 64}
    config = EngineConfig(python=sys.executable, args=args, env=engine_env("cuda", sys.executable, {}))
    model = ModelConfig(path=str(gpu_models[0]), dtype=SHAPE.dtype)

    async def up() -> servers.Server:
        import aiohttp

        async with aiohttp.ClientSession() as session:
            return await servers.start(
                lambda: servers.spawn(config, model, name="gpu", log_dir=log_dir), session, config.start_timeout_s
            )

    server = asyncio.run(up())
    yield server.url
    asyncio.run(server.stop())
