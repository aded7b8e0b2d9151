"""Receive weights from the trainer's memory, on the engine's own GPU (cuda_ipc)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from penstock.errors import EngineDied
from penstock.names import new_token
from penstock.system.connections import BAD_REQUESTS
from penstock.system.processes import is_loopback
from penstock.text import redact
from penstock.workers.weights.receive.receive import Arrival, Receiver

#: Path of SGLang's server.
PATH = "/update_weights_from_tensor"
#: Largest body: handles of a bucket's tensors, for each process of the engine.
_MAX_BODY_BYTES = 256 * 1024**2
#: Longest wait for a client that does not read its answer.
_SHUTDOWN_S = 1.0

#: Like ``Arrival.post``.
Post = Callable[[str, dict[str, Any]], Awaitable[str]]


@asynccontextmanager
async def inlet(post: Post) -> AsyncIterator[str]:
    """Let a trainer write to the engine through its worker while the engine is frozen; yield the URL, without ``PATH``.

        trainer ──bucket──> inlet (loopback, an unguessable path) ──> engine

    A late trainer, such as one that stalled and was replaced, finds it closed. The end waits for the bucket in flight,
    so nothing reaches the engine afterwards.

    Raises:
        EngineDied: at its end, if the engine did not answer to a bucket: its weights are unknown.
    """
    passing, is_open = asyncio.Lock(), True
    lost: EngineDied | None = None
    failure: Exception | None = None

    async def pass_on(request: web.Request) -> web.Response:
        nonlocal lost
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            return _answer("a bucket is a map of JSON", 400)
        async with passing:
            if not is_open:
                return _answer("its worker no longer takes this version", 409)
            try:
                why = await post(PATH, body)
            except EngineDied as exc:
                lost = exc
                return _answer(str(exc), 502)
        return _answer(why, 400 if why else 200)

    token = new_token()
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_post(f"/{token}{PATH}", pass_on)
    runner = web.AppRunner(app, access_log=None, logger=BAD_REQUESTS, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{token}"
    except Exception as exc:
        failure = exc
    finally:
        is_open = False
        try:
            async with passing:
                pass
        finally:
            await runner.cleanup()
    if (error := lost or failure) is not None:
        raise error


def _answer(why: str, status: int) -> web.Response:
    return web.json_response({"success": not why, "message": why}, status=status)


class CudaIpc(Receiver):
    """Let the trainer write to the engine through an inlet of the worker."""

    async def receive(self, arrival: Arrival) -> str:
        if not is_loopback(self.engine.url):
            return await arrival.sent(redact(self.engine.url))  # the trainer refuses and reports it
        async with inlet(arrival.post) as url:
            return await arrival.sent(url)
