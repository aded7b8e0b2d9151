"""A trainer writes into an engine only while its worker holds that still."""

import asyncio
from typing import Any

import aiohttp
import pytest

from penstock.errors import EngineDied
from penstock.workers.weights.receive.ipc import PATH, inlet

BUCKET = {"serialized_named_tensors": ["handles"], "weight_version": "4"}


class Engine:
    """Answers what it is told to, when it is let."""

    def __init__(self, answer: str | EngineDied = "") -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.may_answer, self.is_asked = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self._answer = answer

    async def post(self, path: str, body: dict[str, Any]) -> str:
        self.is_asked.set()
        await self.may_answer.wait()
        self.got.append((path, body))
        if isinstance(self._answer, EngineDied):
            raise self._answer
        return self._answer


async def post(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url + PATH, json=BUCKET) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("answer", "status"), [("", 200), ("out of memory", 400)])
async def test_a_bucket_goes_to_the_engine_and_its_answer_back(answer: str, status: int) -> None:
    engine = Engine(answer)
    async with inlet(engine.post) as url:
        assert await post(url) == (status, {"success": not answer, "message": answer})
    assert engine.got == [(PATH, BUCKET)]


@pytest.mark.parametrize("body", [b"[1, 2]", b"null", b"{", b""])
async def test_what_is_no_bucket_reaches_no_engine(body: bytes) -> None:
    engine = Engine()
    async with (
        inlet(engine.post) as url,
        aiohttp.ClientSession() as session,
        session.post(url + PATH, data=body) as response,
    ):
        assert response.status == 400
    assert engine.got == []


async def test_T1_whoever_comes_behind_its_end_reaches_no_engine() -> None:
    engine = Engine()
    async with inlet(engine.post) as first:
        pass
    async with inlet(engine.post) as second:
        assert (await post(second))[0] == 200
        port = second.rpartition(":")[2].partition("/")[0]
        late = f"http://127.0.0.1:{port}/{first.rpartition('/')[2]}"
        async with aiohttp.ClientSession() as session, session.post(late + PATH, json=BUCKET) as response:
            assert response.status == 404, "of another version, on whatever port"
    with pytest.raises(aiohttp.ClientError):
        await post(first)
    assert len(engine.got) == 1


async def test_T1_its_end_waits_for_a_bucket_that_is_under_way() -> None:
    engine, urls, may_end = Engine(), asyncio.Queue[str](), asyncio.Event()
    engine.may_answer.clear()

    async def hold() -> None:
        async with inlet(engine.post) as url:
            await urls.put(url)
            await may_end.wait()
        assert engine.got == [(PATH, BUCKET)], "nothing comes behind its end"

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold())
        in_flight = tasks.create_task(post(await urls.get()))
        await engine.is_asked.wait()
        may_end.set()
        for _ in range(10):
            await asyncio.sleep(0)
        engine.may_answer.set()
    assert in_flight.result()[0] == 200


async def test_an_engine_that_does_not_answer_is_lost_whatever_the_trainer_says() -> None:
    engine = Engine(EngineDied("the engine is stuck"))
    with pytest.raises(EngineDied, match="the engine is stuck"):
        async with inlet(engine.post) as url:
            assert await post(url) == (502, {"success": False, "message": "the engine is stuck"})
