"""Blocking work that may never come back."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.system.daemon_threads import DaemonThreads

#: Longest wait for what must come, and a wait that is sure to be over by itself.
PATIENCE_S, SOON_S = 60.0, 0.05


@pytest.fixture
def comes_back() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_work_returns_or_raises_what_it_does() -> None:
    threads = DaemonThreads("t", 2)

    def fail(step: Callable[[], None]) -> None:
        raise ValueError("no")

    assert await asyncio.gather(*(threads.do(lambda step, i=i: i, PATIENCE_S) for i in range(9))) == list(range(9))
    with pytest.raises(ValueError, match="no"):
        await threads.do(fail, PATIENCE_S)
    threads.close()


async def test_what_hangs_is_left_and_nothing_else_is_begun_until_it_comes_back(comes_back: threading.Event) -> None:
    threads, begun = DaemonThreads("t", 1), []
    hangs = asyncio.create_task(threads.do(lambda step: comes_back.wait(PATIENCE_S), SOON_S))
    waits = asyncio.create_task(threads.do(lambda step: begun.append(1), SOON_S))
    for task in (hangs, waits):
        with pytest.raises(TimeoutError, match=r"nothing came back in 0.05 s"):
            await task
    with pytest.raises(TimeoutError, match="what was asked before has not come back"):
        await threads.do(lambda step: begun.append(2), PATIENCE_S)
    assert begun == []
    comes_back.set()
    while True:
        try:
            await threads.do(lambda step: begun.append(3), PATIENCE_S)
            break
        except TimeoutError:
            await asyncio.sleep(0)
    assert begun == [3], "what nobody waited for any more was not begun"


async def test_what_makes_progress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: each wait that is over finds that something has come back."""
    threads, wait = DaemonThreads("t", 1), asyncio.wait
    over, stepped = threading.Event(), threading.Event()
    waits: list[None] = []

    def work(step: Callable[[], None]) -> str:
        for _ in range(3):
            assert over.wait(PATIENCE_S)
            over.clear()
            step()
            stepped.set()
        return "done"

    async def until_a_step(answers: Any, timeout: float) -> Any:
        if len(waits) == 3:
            return await wait(answers, timeout=PATIENCE_S)
        waits.append(None)
        over.set()
        assert await asyncio.to_thread(stepped.wait, PATIENCE_S)
        stepped.clear()
        return set(), answers

    monkeypatch.setattr(asyncio, "wait", until_a_step)
    assert await threads.do(work, SOON_S) == "done"
    assert len(waits) == 3
