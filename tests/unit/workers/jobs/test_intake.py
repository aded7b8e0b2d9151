"""What ends the sleep of a worker that found no job: a wake-up, a free slot, or weights that let it start more."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.records.keys import Keys
from penstock.workers.jobs.intake import Intake
from penstock.workers.services import Services


class Waker:
    """A connection whose blocking read never returns anything."""

    def __init__(self) -> None:
        self.asleep = asyncio.Event()

    async def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        self.asleep.set()
        await asyncio.Event().wait()


class Looks:
    """An intake whose leases return nothing; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.more = asyncio.Event()
        self.waker = Waker()
        engine = SimpleNamespace(version=1, offloaded=set())
        self.services: Any = SimpleNamespace(
            config=SimpleNamespace(worker=SimpleNamespace(slots=4)),
            keys=Keys("t"),
            control=SimpleNamespace(losses=0),
            engine=engine,
            engine_lost=asyncio.Event(),
            crash_loop="",
            valves=SimpleNamespace(cause=None),
            room=asyncio.Event(),
            may_start_more=asyncio.Event(),
        )
        held: Any = SimpleNamespace(num_ungenerated=0, num_open=0)
        waiting: Any = SimpleNamespace(blocked_on=lambda cause: None, end=lambda: None)
        self.draining = asyncio.Event()
        self.intake = Intake(
            self.services,
            held,
            waker=self.waker,  # type: ignore[arg-type]
            waiting=waiting,
            draining=self.draining,
            verify_before_suspect=lambda: asyncio.sleep(0, False),
        )
        monkeypatch.setattr(self.intake, "_lease", self._lease)
        monkeypatch.setattr(self.intake, "_why_idle", lambda: None)
        self.while_leasing: Callable[[], None] = lambda: None

    async def _lease(self) -> int:
        self.count += 1
        self.while_leasing()
        self.more.set()
        return 0


async def test_weights_that_were_loaded_wake_the_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    running = asyncio.create_task(looks.intake.run())
    await looks.waker.asleep.wait()
    assert looks.count == 1
    looks.more.clear()
    looks.services.may_start_more.set()
    await asyncio.wait_for(looks.more.wait(), 60)
    assert looks.count == 2
    looks.draining.set()
    await running


async def test_weights_that_were_loaded_while_it_leased_wake_the_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    """That lease may have named the version before."""
    looks = Looks(monkeypatch)

    def load() -> None:
        if looks.count == 1:
            looks.services.may_start_more.set()
        else:
            looks.draining.set()

    looks.while_leasing = load
    await asyncio.wait_for(looks.intake.run(), 60)
    assert looks.count == 2


def test_an_engine_that_is_back_wakes_the_intake() -> None:
    services: Any = SimpleNamespace(
        engine_lost=asyncio.Event(), may_start_more=asyncio.Event(), _shut=SimpleNamespace(close=lambda: None)
    )
    Services.regain_engine(services)
    assert services.may_start_more.is_set()
