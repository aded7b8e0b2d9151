"""Connections that outlive a restart of Redis: what asyncio's tasks rely on."""

import asyncio
from typing import Any

import pytest

from penstock.redis.control import AsyncControl


@pytest.fixture
async def control() -> AsyncControl:
    """A control whose server is never asked."""
    return AsyncControl("redis://127.0.0.1:1/0")


async def test_a_cancellation_that_comes_when_a_command_is_just_sent_is_not_forgotten(control: AsyncControl) -> None:
    """The client sends through ``asyncio.wait_for``, which forgets it before Python 3.12: the loop would never end."""
    sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    rounds: list[str] = []

    async def send(client: Any) -> str:
        return await asyncio.wait_for(sent, 60)

    async def follow() -> None:
        while True:
            rounds.append(await control.do(send))
            await asyncio.sleep(0)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sent.set_result("sent")
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    if not done:
        task.cancel()
    assert task.cancelled()
    assert rounds == []


async def test_what_a_cancelled_task_tidies_up_is_sent(control: AsyncControl) -> None:
    async def send(client: Any) -> str:
        await asyncio.sleep(0)
        return "sent"

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await control.do(send)
        return "not cancelled"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "sent"
