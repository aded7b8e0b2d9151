"""Connections end as their server wants."""

import asyncio
import socket
from types import SimpleNamespace

from aiohttp import web

from penstock.system.connections import Connections


async def test_a_request_under_way_is_answered_after_the_server_accepts_no_more() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(_: web.BaseRequest) -> web.Response:
        begun.set()
        await go_on.wait()
        return web.Response(text="answer")

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    port = listening.getsockname()[1]
    connections = Connections(answer, 2, SimpleNamespace(connections=0, refused=0), idle_s=30.0, linger_s=0.0)
    accepting = asyncio.create_task(connections.accept(listening, None))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    await begun.wait()
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)
    ending = asyncio.create_task(connections.shutdown(30.0))
    go_on.set()
    assert (await reader.read()).endswith(b"answer")
    await ending
    writer.close()
