"""A worker that starts an engine, says so, and waits to be killed. Run by test_engine_lifetime."""

import asyncio
import sys
from pathlib import Path

from penstock.config import EngineConfig, ModelConfig
from penstock.workers.sglang.engine import SglangEngine


async def main() -> None:
    config, model, log_dir = sys.argv[1:]
    engine = SglangEngine(
        EngineConfig.model_validate_json(config),
        ModelConfig.model_validate_json(model),
        name="orphan",
        log_dir=Path(log_dir),
    )
    await engine.start(None)
    print(engine.pid, engine.url, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
