"""A proxy before a server that holds streams back around every change of weights, as a slow network may."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from workers.sglang.http import open_session

#: How long what is streamed is held back after the server was told to go on.
HOLD_S = 1.0


class HoldingProxy:
    """Passes everything on; chunks of answers to /generate wait from a pause until ``HOLD_S`` after its end."""

    def __init__(self, target: str) -> None:
        self.url = ""
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._holds = 0
        #: Streams with chunks that had to wait.
        self.num_held = 0
        #: What the server was told its weights are called, in order.
        self.marks: list[str] = []
        #: Mark -> streams in which the server has sent tokens behind an event that bears it.
        self.proven: Counter[str] = Counter()

    @asynccontextmanager
    async def up(self) -> AsyncIterator["HoldingProxy"]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with open_session() as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    def _release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._flows.set()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/pause_generation":
            self._holds += 1
            self._flows.clear()
        if request.path == "/update_weight_version":
            self.marks.append((await request.json())["new_version"])
        async with self._session.request(
            request.method, self._target + request.path_qs, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
            reading = asyncio.create_task(self._read(answer, chunks))
            held = False
            # The proofs of the client are no streams, and must not wait for what they are to prove.
            while (chunk := await chunks.get()) is not None:
                if request.path == "/generate" and answer.content_type == "text/event-stream":
                    if not held and not self._flows.is_set():
                        held = True
                        self.num_held += 1
                    await self._flows.wait()
                await response.write(chunk)
            await reading
            await response.write_eof()
        if request.path == "/continue_generation":
            asyncio.get_running_loop().call_later(HOLD_S, self._release)
        return response

    async def _read(self, answer: aiohttp.ClientResponse, chunks: "asyncio.Queue[bytes | None]") -> None:
        """What the server sends is taken at once, so that only the way to the client is slow."""
        marked: Counter[str] = Counter()
        rest = b""
        try:
            async for chunk in answer.content.iter_any():
                chunks.put_nowait(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                for mark in (found[1].decode() for line in lines if (found := _MARK.search(line))):
                    marked[mark] += 1
                    self.proven[mark] += marked[mark] == 2
        finally:
            chunks.put_nowait(None)


_MARK = re.compile(rb'"weight_version": ?"(\d+\+)"')
