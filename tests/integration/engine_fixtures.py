"""A real SGLang server for tests: one per test session, on CPU, in float32.

Its prefix cache is on, which makes weights in place harder; its steps do not overlap, so that every version is proven.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.config.engine import PRESET_ARGS
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.records.publication import Publication
from penstock.workers.sglang import server as servers
from penstock.workers.sglang.engine import SglangEngine
from tests.missing import need
from tests.tiny_model import make_tiny_model, publication_of

ENGINE_PYTHON = os.environ.get("PENSTOCK_ENGINE_PYTHON", ".engine/bin/python")

#: A server on CPU, as small as it gets.
CPU_ARGS: dict[str, object] = {**PRESET_ARGS["cpu"], "max-running-requests": 64, "skip-server-warmup": True}
# Its prefix cache is on (see above).
del CPU_ARGS["disable-radix-cache"]


def cpu_engine(**changes: object) -> EngineConfig:
    """Configuration of a spawned CPU server; ``changes`` are arguments of the server."""
    need(ENGINE_PYTHON, "engine")
    return EngineConfig(
        python=ENGINE_PYTHON,
        args=CPU_ARGS | changes,
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        # Nothing but an engine that hangs may reach these, however slow the machine.
        start_timeout_s=600,
        health_interval_s=0.2,
        health_timeout_s=20,
        request_timeout_s=900,
    )


def opened(config: EngineConfig) -> EngineConfig:
    """The same, of a server that does on a CPU what SGLang keeps for GPUs; see ``opened_on_cpu/sitecustomize.py``."""
    folder = Path(__file__).parent / "opened_on_cpu"
    return config.model_copy(update={"env": config.env | {"PYTHONPATH": str(folder)}})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of tiny models that differ in their weights; the first is what servers start with.

    As many as ``workload.produce`` may need on a machine that is starved.
    """
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / f"w{seed}", seed) for seed in range(15)]


@pytest.fixture(scope="session")
def publications(models: list[Path]) -> list[Publication]:
    """Publication of version v at index v; index 0 is no publication (the model that servers start with)."""
    return [publication_of(folder, version) for version, folder in enumerate(models)]


@pytest.fixture(scope="session")
def model_config(models: list[Path]) -> ModelConfig:
    return ModelConfig(path=str(models[0]), dtype="float32")


async def up(config: EngineConfig, model: ModelConfig, log_dir: Path) -> servers.Server:
    def make() -> servers.Server:
        return servers.spawn(config, model, name="shared", log_dir=log_dir)

    async with aiohttp.ClientSession() as session:
        return await servers.start(make, session, config.start_timeout_s)


@pytest.fixture(scope="session")
def engine_url(model_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the session's server. Tests load what they need; none may kill it."""
    config = cpu_engine(**{"incremental-streaming-output": True})
    with pytest.MonkeyPatch.context() as shell:
        # Whoever starts a worker may have it; the engine must not.
        shell.setenv(ORIGINAL_LOGPROB, "true")
        server = asyncio.run(up(config, model_config, tmp_path_factory.mktemp("engine")))
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
async def engine(
    engine_url: str, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> AsyncIterator[SglangEngine]:
    """A client of the session's server that has version 1 loaded."""
    config = cpu_engine().model_copy(update={"url": engine_url})
    engine = SglangEngine(config, model_config, name="test", log_dir=tmp_path)
    await engine.start(publications[1])
    yield engine
    await engine.stop()
