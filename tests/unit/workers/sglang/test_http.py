"""The way to an engine over HTTP, where its server does with connections what servers may."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.http import ConnectionClosed, EngineHttp

BODY = json.dumps(
    {"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5, None]]}}
).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Closing:
    """A server that closes each connection under the next request, after it has answered ``answers`` requests on it.

    Args:
        answers: 0: it closes the connection once the first request is read, like a server that dies over it.
        reads: whether it reads the request under which it closes the connection.
        answer: sent as each answer.
    """

    def __init__(self, *, answers: int = 1, reads: bool = False, answer: bytes = ANSWER) -> None:
        self.url = ""
        #: Requests read so far, and their rids; connections accepted so far.
        self.num_read = 0
        self.rids: list[str] = []
        self.num_connections = 0
        #: Cleared: it keeps open the connections that it would close.
        self.may_close = asyncio.Event()
        self.may_close.set()
        #: Set once it has read a request that it does not answer.
        self.is_silent = asyncio.Event()
        self._answers = answers
        self._answer = answer
        self._reads = reads or not answers

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Closing"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        for _ in range(self._answers):
            try:
                await self._read(reader)
            except asyncio.IncompleteReadError:
                break
            writer.write(self._answer)
            await writer.drain()
        else:
            await (self._read(reader) if self._reads else reader.read(1))
            self.is_silent.set()
            await self.may_close.wait()
        writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        body = await reader.readexactly(sum(lengths))
        self.num_read += 1
        if b"rid" in body:
            self.rids.append(json.loads(body)["rid"])


def way_to(url: str) -> EngineHttp:
    http = EngineHttp("t", EngineConfig(), most_bytes=lambda _: 1 << 20, ended=lambda: "")
    http.open()
    http.url = url
    return http


@asynccontextmanager
async def opened(server: Closing) -> AsyncIterator[EngineHttp]:
    async with server.up():
        http = way_to(server.url)
        try:
            yield http
        finally:
            session = http.detach()
            assert session is not None
            await session.close()


PATHS = ["/pause_generation", "/release_memory_occupation", "/generate"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/server_info"), *(("POST", path) for path in PATHS)])
async def test_a_connection_that_the_server_closes_after_an_answer_is_no_death(method: str, path: str) -> None:
    async with opened(server := Closing()) as http:
        body: dict[str, Any] | None = {} if method == "POST" else None
        assert [await http.call(method, path, body) for _ in range(3)] == [json.loads(BODY)] * 3
    assert server.num_read == 3


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_may_have_been_carried_out_is_sent_once(path: str) -> None:
    async with opened(server := Closing(answers=0)) as http:
        with pytest.raises(EngineDied, match=path) as caught:
            await http.call("POST", path, {}, keep=True)
    assert server.num_read == 1
    assert not isinstance(caught.value, ConnectionClosed)


async def test_requests_for_tokens_share_a_connection_and_controls_do_not() -> None:
    async with opened(server := Closing(answers=8)) as http:
        for _ in range(3):
            await http.call("POST", "/generate", {}, keep=True)
        assert server.num_connections == 1
        await http.call("POST", "/pause_generation", {})
        assert server.num_connections == 2


@pytest.mark.parametrize("reads", [False, True])
async def test_a_request_on_a_connection_that_the_server_closes_is_sent_again_under_another_name(
    reads: bool, tmp_path: Path
) -> None:
    async with Closing(reads=reads).up() as server:
        engine = SglangEngine(EngineConfig(url=server.url), ModelConfig(path=str(tmp_path)), name="t", log_dir=tmp_path)
        engine.http.open()
        segments = [await engine.generate([1], {"max_new_tokens": 1}, rid="j/0") for _ in range(2)]
        await engine.stop()
    assert [one.output_ids for one in segments] == [[5], [5]]
    assert [one.was_lost for one in segments] == [False, True], "the tokens of the lost request are unknown"
    assert len(set(server.rids)) == len(server.rids) == 2 + reads


async def test_a_request_in_flight_is_not_sent_again_when_its_engine_is_stopped(tmp_path: Path) -> None:
    async with Closing(reads=True).up() as server:
        engine = SglangEngine(EngineConfig(url=server.url), ModelConfig(path=str(tmp_path)), name="t", log_dir=tmp_path)
        engine.http.open()
        await engine.generate([1], {"max_new_tokens": 1}, rid="j/0")
        server.may_close.clear()
        request = asyncio.create_task(engine.generate([1], {"max_new_tokens": 1}, rid="j/1"))
        await server.is_silent.wait()
        sessions = engine.http.detach()
        assert sessions is not None
        engine.http.open()  # as a restart does
        await sessions.close()
        with pytest.raises(EngineDied):
            await request
        assert server.num_read == 2
        await engine.stop()
        server.may_close.set()


@pytest.mark.parametrize("keep", [False, True])
async def test_closing_the_sessions_fails_a_request_whose_answer_is_being_read(keep: bool) -> None:
    """aiohttp itself leaves the reader of the body waiting."""
    is_reading = asyncio.Event()

    async def read() -> None:
        async with http.request("POST", "/generate", {}, 3600, keep=keep) as response:
            is_reading.set()
            async for _ in response.content.iter_any():
                pass

    async with Closing(answer=ANSWER[:-1]).up() as server:
        server.may_close.clear()
        http = way_to(server.url)
        request = asyncio.create_task(read())
        await is_reading.wait()
        sessions = http.detach()
        assert sessions is not None
        await sessions.close()
        done, _ = await asyncio.wait({request}, timeout=20)
        server.may_close.set()
        request.cancel()
    assert done
    with pytest.raises(EngineDied, match="/generate"):
        request.result()
