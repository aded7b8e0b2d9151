"""An SGLang server for a benchmark: a random model of the asked shape, on CPU or on a GPU."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common import version_in
from benchmarks.random_model import Shape, make_model
from penstock.config import EngineConfig, ModelConfig
from penstock.config.engine import PRESET_ARGS, PRESET_ENV
from penstock.workers.sglang import server as servers

#: Arguments of the server by device. Streams say each token once, as those of servers that a worker spawns.
ARGS: dict[str, dict[str, Any]] = {
    "cpu": {
        **PRESET_ARGS["cpu"], "max-total-tokens": 60000, "incremental-streaming-output": True,
    },
    # What runs with every build of SGLang's kernels; graphs of prefills take a minute to capture.
    "cuda": {
        "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
        "disable-radix-cache": True, "cuda-graph-backend-prefill": "disabled", "incremental-streaming-output": True,
    },
}  # fmt: skip
ENV = {
    "cpu": PRESET_ENV["cpu"],
    "cuda": {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
}


def default_python(device: str) -> str:
    """Interpreter that has sglang, unless told otherwise: an environment of its own on CPU, this one on a GPU."""
    return ".engine/bin/python" if device == "cpu" else sys.executable


def engine_env(device: str, python: str, env: dict[str, str]) -> dict[str, str]:
    """Environment variables of a server; one of this very Python also finds its packages where this one does."""
    shared = {"PYTHONPATH": os.environ["PYTHONPATH"]} if python == sys.executable and "PYTHONPATH" in os.environ else {}
    return ENV[device] | shared | env


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A server that answers at ``url``."""

    url: str
    #: Folder of its model.
    model: Path
    #: Folder for further files of the benchmark, gone with the engine.
    folder: Path
    sglang: str


@contextmanager
def running_engine(
    shape: Shape, *, device: str, python: str, args: dict[str, Any], env: dict[str, str]
) -> Iterator[RunningEngine]:
    """Make the model, start the server, wait until it answers, and end it with all its processes afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        make_model(folder / "model", shape)
        config = EngineConfig(python=python, args=ARGS[device] | args, env=engine_env(device, python, env))
        model = ModelConfig(path=str(folder / "model"), dtype=shape.dtype)
        server = asyncio.run(_start(config, model, folder))
        try:
            sglang = version_in(Path(python), "sglang") or "unknown"
            yield RunningEngine(server.url, folder / "model", folder, sglang)
        finally:
            asyncio.run(server.stop())


@contextmanager
def serving(model: Path, *, device: str, python: str) -> Iterator[RunningEngine]:
    """As ``running_engine``, for a model folder that is there already."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        config = EngineConfig(python=python, args=ARGS[device], env=ENV[device])
        server = asyncio.run(_start(config, ModelConfig(path=str(model), dtype="float32"), Path(name)))
        try:
            yield RunningEngine(server.url, model, Path(name), version_in(Path(python), "sglang") or "unknown")
        finally:
            asyncio.run(server.stop())


async def _start(config: EngineConfig, model: ModelConfig, folder: Path) -> servers.Server:
    async with aiohttp.ClientSession() as session:
        return await servers.start(
            lambda: servers.spawn(config, model, name="bench", log_dir=folder), session, config.start_timeout_s
        )
