"""Requests that begin together are one batch, and fail, end and are aborted one by one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError, EngineRefused
from penstock.workers.engine import Segment
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.server_info import ServerInfo

#: Only a request that hangs takes so long.
LIMIT_S = 20.0
SAMPLING = {"max_new_tokens": 3, "temperature": 1.0}


def event(index: int, ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish} if finish else None,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "completion_tokens": len(ids),
        **more,
    }
    return {"index": index, "output_ids": ids, "meta_info": meta}


def answer_to(index: int) -> list[int]:
    return [10 + index, 11, 12]


class Server:
    """Answers batches and single requests; what it was sent is kept, and the test decides when a request ends."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        #: Indices of requests that are answered only when they are aborted.
        self.held: set[int] = set()
        self.is_held = asyncio.Event()
        self.ended = asyncio.Event()
        #: Changes the last event of a request, or ends the stream with it.
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda one: one
        #: HTTP status of batches; the error statuses have no events.
        self.status = 200
        self._aborts: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def up(self) -> AsyncIterator[SglangEngine]:
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate), web.post("/abort_request", self._abort)])
        server = TestServer(app)
        await server.start_server()
        url = str(server.make_url("")).rstrip("/")
        engine = SglangEngine(EngineConfig(url=url), ModelConfig(path="nowhere"), name="t", log_dir=Path())
        engine.info = ServerInfo(reports_spans=True, takes_batches=True)
        engine.http.open()
        try:
            yield engine
        finally:
            await engine.stop()
            await server.close()

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self._aborts.setdefault(rid, asyncio.Event()).set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not isinstance(body["rid"], list):
            return web.json_response(event(0, [99], "stop"))
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for index in range(len(body["rid"])):
                await self._write(response, event(index, answer_to(index)[:1]))
            for index, rid in enumerate(body["rid"]):
                if index not in self.held:
                    await self._write(response, self.change(event(index, answer_to(index), "stop")))
                    continue
                self.is_held.set()
                await self._aborts.setdefault(rid, asyncio.Event()).wait()
                await self._write(response, event(index, answer_to(index)[:2], "abort"))
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.ended.set()
        return response

    async def _write(self, response: web.StreamResponse, one: dict[str, Any]) -> None:
        await response.write(one.get("raw") or b"data: " + json.dumps(one).encode() + b"\n\n")


def group(engine: SglangEngine, n: int = 3) -> "list[asyncio.Task[Segment]]":
    return [asyncio.create_task(engine.generate([1, 2], SAMPLING, rid=f"j/{k}")) for k in range(n)]


async def test_requests_of_a_group_are_one_request_with_a_name_each() -> None:
    async with (server := Server()).up() as engine:
        segments = await asyncio.gather(*group(engine))
        assert engine.num_running == 0
    (body,) = server.bodies
    assert body["input_ids"] == [[1, 2]] * 3
    assert [rid.partition(":")[0] for rid in body["rid"]] == ["j/0", "j/1", "j/2"]
    assert len(set(body["rid"])) == 3
    assert all(one["stream_interval"] > one["max_new_tokens"] for one in body["sampling_params"])
    assert [one.output_ids for one in segments] == [answer_to(k) for k in range(3)]
    assert [one.logprobs for one in segments] == [[-0.5] * 3] * 3
    assert not any(one.was_lost for one in segments)


async def test_other_tokens_are_another_request_and_a_single_one_is_not_streamed() -> None:
    async with (server := Server()).up() as engine:
        found = await asyncio.gather(
            engine.generate([1, 2], SAMPLING, rid="j/0"),
            engine.generate([1, 2], SAMPLING, rid="j/1"),
            engine.generate([3], SAMPLING, rid="j/2"),
        )
    assert [one.output_ids for one in found] == [answer_to(0), answer_to(1), [99]]
    assert sorted(isinstance(body["rid"], list) for body in server.bodies) == [False, True]
    assert not any(body.get("stream") for body in server.bodies if isinstance(body["rid"], str))


async def test_an_answer_arrives_before_those_of_its_siblings_and_one_is_aborted_by_its_name() -> None:
    server = Server()
    server.held = {2}
    async with server.up() as engine:
        first, second, last = group(engine)
        assert [(await one).output_ids for one in (first, second)] == [answer_to(0), answer_to(1)]
        assert not last.done()
        await engine.abort("j/2")
        assert (await last).output_ids == answer_to(2)[:2]
        assert (await last).finish_reason == "abort"
    assert server.aborted == [server.bodies[0]["rid"][2]]


async def test_a_cancelled_request_is_aborted_and_its_siblings_are_answered() -> None:
    server = Server()
    server.held = {0}
    async with server.up() as engine:
        tasks = group(engine)
        await server.is_held.wait()
        tasks[0].cancel()
        assert [(await one).output_ids for one in tasks[1:]] == [answer_to(1), answer_to(2)]
    assert server.aborted == [server.bodies[0]["rid"][0]]


async def test_a_batch_that_nobody_waits_for_is_cut() -> None:
    server = Server()
    server.held = {0}
    async with server.up() as engine:
        tasks = group(engine)
        await server.is_held.wait()
        for task in tasks:
            task.cancel()
        await server.ended.wait()
        assert await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.num_running == 0


async def test_an_error_of_the_batch_sends_each_unfinished_request_alone() -> None:
    server = Server()
    server.change = lambda one: {"error": {"message": "no", "code": 400}} if one["index"] == 1 else one
    async with server.up() as engine:
        segments = await asyncio.gather(*group(engine))
    assert [one.output_ids for one in segments] == [answer_to(0), [99], [99]]
    assert [one.was_lost for one in segments] == [False, True, True], "what was generated for them is unknown"
    rids = [*server.bodies[0]["rid"], *(body["rid"] for body in server.bodies[1:])]
    assert len(set(rids)) == 5


@pytest.mark.parametrize(
    "raw", [b"data: {oops\n\n", b"data: [1]\n\n", b'data: {"a":"\xff"}\n\n', b'data: {"a":NaN}\n\n', b"\n"]
)
async def test_an_event_that_cannot_be_read_or_is_missing_sends_each_unfinished_request_alone(raw: bytes) -> None:
    server = Server()
    server.change = lambda one: {"raw": raw} if one["index"] == 1 else one
    async with server.up() as engine:
        segments = await asyncio.gather(*group(engine))
    others = [99] if raw.startswith(b"data") else answer_to(2)
    assert [one.output_ids for one in segments] == [answer_to(0), [99], others]


async def test_a_batch_that_takes_too_long_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.held = {0}
    async with server.up() as engine:
        monkeypatch.setitem(engine.config.__dict__, "request_timeout_s", 0.5)
        found = await asyncio.gather(*group(engine), return_exceptions=True)
    assert [type(one) for one in found] == [EngineError] * 3
    assert len(server.bodies) <= 1, "none arrives if the machine is busy"


async def test_an_id_outside_the_vocabulary_fails_its_request_alone() -> None:
    server = Server()
    server.change = lambda one: event(1, [45, 1], "stop") if one["index"] == 1 else one
    async with server.up() as engine:
        engine.vocab_size = 45
        found = await asyncio.gather(*group(engine), return_exceptions=True)
    assert [one.output_ids for one in found[::2] if isinstance(one, Segment)] == [answer_to(0), answer_to(2)]
    assert isinstance(found[1], EngineError)
    assert "not token ids of the model" in str(found[1])


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefused), (500, EngineError)])
async def test_an_error_in_an_answer_is_that_of_its_request(status: int, error: type[Exception]) -> None:
    server = Server()

    def broken(one: dict[str, Any]) -> dict[str, Any]:
        if one["index"] == 1:
            one["meta_info"]["finish_reason"] = {"type": "abort", "status_code": status}
        return one

    server.change = broken
    async with server.up() as engine:
        found = await asyncio.gather(*group(engine), return_exceptions=True)
    assert type(found[1]) is error
    assert [one.output_ids for one in found[::2] if isinstance(one, Segment)] == [answer_to(0), answer_to(2)]
    assert len(server.bodies) == 1


async def test_a_batch_that_is_cut_off_is_the_death_of_its_engine() -> None:
    server = Server()

    def cut(_: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionResetError

    server.change = cut
    async with server.up() as engine:
        found = await asyncio.gather(*group(engine), return_exceptions=True)
    assert [type(one) for one in found] == [EngineDied] * 3


async def test_stopping_the_engine_fails_the_unfinished_requests_of_a_batch() -> None:
    server = Server()
    server.held = {1}
    async with server.up() as engine:
        tasks = group(engine)
        assert (await tasks[0]).output_ids == answer_to(0)
        await engine.stop()
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert [type(one) for one in found] == [EngineDied] * 2
        assert engine.num_running == 0
    assert len(server.bodies) == 1, "nothing was sent again"


@pytest.mark.parametrize(("status", "num_batches"), [(400, 2), (413, 1), (422, 1), (429, 2), (503, 2)])
async def test_a_refused_batch_generated_nothing_and_after_413_or_422_no_batches_are_sent(
    status: int, num_batches: int
) -> None:
    server = Server()
    server.status = status
    async with server.up() as engine:
        segments = [one for _ in range(2) for one in await asyncio.gather(*group(engine))]
    assert [one.output_ids for one in segments] == [[99]] * 6
    assert not any(one.was_lost for one in segments)
    assert sum(isinstance(body["rid"], list) for body in server.bodies) == num_batches


async def test_tokens_of_a_batch_that_failed_with_500_are_unknown() -> None:
    server = Server()
    server.status = 500
    async with server.up() as engine:
        segments = await asyncio.gather(*group(engine))
    assert all(one.was_lost for one in segments)


async def test_an_unexpected_exception_fails_every_request_of_the_batch() -> None:
    """Its constructor needs more arguments than ``args`` has."""
    server = Server()

    def broken(_: str) -> None:
        raise json.JSONDecodeError("no", "", 0)

    async with server.up() as engine:
        engine._batches._on_tokens = broken
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*group(engine), return_exceptions=True)
    assert [type(one) for one in found] == [json.JSONDecodeError] * 3
