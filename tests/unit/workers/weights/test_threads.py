"""Work in a thread is over when its task is."""

import asyncio
import threading

import pytest

from penstock.workers.weights.download import to_thread_shielded


def refuse(what: str) -> int:
    raise ValueError(what)


async def test_it_gives_and_raises_what_the_work_does() -> None:
    assert await to_thread_shielded(int, "7") == 7
    with pytest.raises(ValueError, match="no"):
        await to_thread_shielded(refuse, "no")


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_ends_with_the_work_however_often(fails: bool) -> None:
    begun, may_end, ended = asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(60)
        ended.append("work")
        if fails:
            raise ValueError("no")

    task = asyncio.create_task(to_thread_shielded(work))
    await begun.wait()
    for _ in range(2):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]
