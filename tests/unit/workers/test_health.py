"""When an engine is started again, when that is a crash loop, and when its health is not asked for."""

import asyncio
from pathlib import Path

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.workers.health import SHOWN_CHARS, Restarts, shorten
from penstock.workers.sglang.engine import SglangEngine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def restarts(clock: Clock) -> Restarts:
    config = EngineConfig(restart_wait_s=1.0, max_restart_wait_s=6.0, crash_loop_failures=5, crash_loop_window_s=100.0)
    return Restarts(config, clock)


def test_the_first_start_is_at_once_and_the_others_back_off() -> None:
    failing = restarts(Clock())
    waits = []
    for _ in range(6):
        failing.note_failure()
        waits.append(failing.wait_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_enough_failures_within_the_window_are_a_crash_loop_until_it_passes() -> None:
    clock = Clock()
    failing = restarts(clock)
    for _ in range(4):
        failing.note_failure()
        clock.now += 10.0
    assert not failing.is_loop
    failing.note_failure()
    assert failing.is_loop
    assert failing.said() == "failed 5 times in 100 s"
    clock.now = 100.5
    assert not failing.is_loop, "the first failure is older than the window"
    clock.now = 1000.0
    failing.note_failure()
    assert failing.wait_s == 0.0


def test_an_engine_that_settled_begins_anew() -> None:
    failing = restarts(Clock())
    for _ in range(5):
        failing.note_failure()
    failing.note_settled()
    assert (failing.count, failing.is_loop) == (0, False)


def test_a_reason_is_shown_by_its_first_and_last_lines_without_passwords() -> None:
    lines = ["it died", *[f"line {index} http://me:secret@host/" for index in range(30)]]
    shown = shorten("\n\n".join(lines)).splitlines()
    assert (shown[0], shown[-1], len(shown)) == ("it died", "line 29 http://me:***@host/", 9)
    assert len(shorten("\n".join(["x" * 5000] * 50))) <= SHOWN_CHARS
    assert shorten("") == ""


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
    assert "failed 2 health checks in a row" in await asyncio.wait_for(watching, 60)
    assert engine.checks == 2


async def test_health_is_not_checked_before_the_first_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    wait = asyncio.wait

    async def waited(tasks: set[asyncio.Task[str]], *, timeout: float | None = None) -> object:
        waits.append(timeout)
        return await wait(tasks, timeout=0)

    monkeypatch.setattr("penstock.workers.sglang.engine.asyncio.wait", waited)
    await _Silent(tmp_path, health_first_wait_s=90.0, health_interval_s=2.0, health_failures=2).watch()
    assert waits == [90.0, 2.0]
