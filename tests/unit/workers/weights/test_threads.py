"""Work in a thread is over when its task is."""

import asyncio
import threading

import pytest

from penstock.workers.weights.fetch.fetcher import to_its_end


def refuse(what: str) -> int:
    raise ValueError(what)


async def test_it_gives_and_raises_what_the_work_does() -> None:
    assert await to_its_end(int, "7") == 7
    with pytest.raises(ValueError, match="no"):
        await to_its_end(refuse, "no")


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

    task = asyncio.create_task(to_its_end(work))
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
