"""The shown reason for the loss of an engine, and when its health is not checked."""

import asyncio
from pathlib import Path

from penstock.config import EngineConfig, ModelConfig
from penstock.text import SHOWN_CHARS, shorten_reason
from penstock.workers.sglang.engine import SglangEngine


def test_a_reason_is_shown_by_its_first_and_last_lines_without_passwords() -> None:
    lines = ["it died", *[f"line {index} http://me:secret@host/" for index in range(30)]]
    shown = shorten_reason("\n\n".join(lines)).splitlines()
    assert (shown[0], shown[-1], len(shown)) == ("it died", "line 29 http://me:***@host/", 9)
    assert len(shorten_reason("\n".join(["x" * 5000] * 50))) <= SHOWN_CHARS
    assert shorten_reason("") == ""


class _Silent(SglangEngine):
    """An engine whose scheduler never answers; counts the checks."""

    def __init__(self, folder: Path, **config: float) -> None:
        super().__init__(EngineConfig(**config), ModelConfig(path=str(folder)), name="silent", log_dir=folder)
        self.checks = 0

    async def healthy(self) -> bool:
        self.checks += 1
        return False


async def test_health_is_not_checked_while_weights_change(tmp_path: Path) -> None:
    engine = _Silent(tmp_path, health_interval_s=0.001, health_failures=2)
    with engine.unwatched():
        with engine.unwatched():
            pass
        watching = asyncio.create_task(engine.watch())
        await asyncio.wait({watching}, timeout=0.1)
        assert not watching.done()
        assert engine.checks == 0
    assert "failed 2 consecutive health checks" in await asyncio.wait_for(watching, 60)
    assert engine.checks == 2
