"""The way to an engine over HTTP, where its server does with connections what servers may."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.config import EngineConfig, FaultsConfig
from penstock.errors import EngineDied
from penstock.workers.sglang.faults import FaultyPath
from penstock.workers.sglang.http import EngineHttp

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Closing:
    """A server that ends a connection under the request after its first answer; or instead of an answer.

    Args:
        answers: False: it ends the connection once the request is read, as a server that dies over it.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self.url = ""
        #: Requests read so far.
        self.num_read = 0
        self._answers = answers

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Closing"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        await reader.readexactly(sum(lengths))
        self.num_read += 1
        if self._answers:
            writer.write(ANSWER)
            await writer.drain()
            await reader.read(1)
        writer.transport.abort()


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
        body = {} if method == "POST" else None
        assert [await http.call(method, path, body) for _ in range(3)] == [{}, {}, {}]
    assert server.num_read == 3


async def test_nor_is_it_behind_the_proxy_of_faults() -> None:
    async with Closing().up() as server:
        proxy = FaultyPath(FaultsConfig(), None)
        await proxy.up(server.url)
        http = way_to(proxy.url)
        assert [await http.call("POST", "/generate", {}) for _ in range(3)] == [{}, {}, {}]
        session = http.detach()
        assert session is not None
        await session.close()
        await proxy.close()


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_may_have_been_carried_out_is_sent_once(path: str) -> None:
    async with opened(server := Closing(answers=False)) as http:
        with pytest.raises(EngineDied, match=path):
            await http.call("POST", path, {})
    assert server.num_read == 1
