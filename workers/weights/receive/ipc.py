"""Receive weights from the trainer's memory, on the engine's own GPU (cuda_ipc)."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from penstock.errors import EngineDied
from penstock.names import new_token
from penstock.system.processes import is_loopback
from penstock.text import redact
from penstock.weights.serving import BAD_REQUESTS
from penstock.workers.weights.receive.receive import Arrival, Receiver

#: Path of SGLang's server.
PATH = "/update_weights_from_tensor"
#: Largest body: handles of a bucket's tensors, for each process of the engine.
_MAX_BODY_BYTES = 256 * 1024**2
#: Longest wait for a client that does not read its answer.
_SHUTDOWN_S = 1.0

#: Like ``Arrival.post``.
Post = Callable[[str, dict[str, Any]], Awaitable[str]]


class Inlet:
    """Let a trainer write to the engine through its worker, within ``async with``, while the engine is frozen.

        trainer ──bucket──> inlet (loopback, an unguessable path) ──> engine

    A late trainer, such as one that stalled and was replaced, finds it closed. The end waits for the bucket in flight,
    so nothing reaches the engine afterwards.

    Raises:
        EngineDied: at its end, if the engine did not answer to a bucket: its weights are unknown.
    """

    def __init__(self, post: Post) -> None:
        #: Base URL for buckets, without ``PATH``.
        self.url = ""
        self._post = post
        self._is_open = False
        self._passing = asyncio.Lock()
        self._lost: EngineDied | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        token = new_token()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post(f"/{token}{PATH}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, logger=BAD_REQUESTS, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/{token}"
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            async with self._passing:
                pass
        finally:
            assert self._runner is not None
            await self._runner.cleanup()
        if self._lost is not None and (exc is None or isinstance(exc, Exception)):
            raise self._lost

    async def _pass_on(self, request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            return _answer("a bucket is a map of JSON", 400)
        async with self._passing:
            if not self._is_open:
                return _answer("its worker no longer takes this version", 409)
            try:
                why = await self._post(PATH, body)
            except EngineDied as exc:
                self._lost = exc
                return _answer(str(exc), 502)
        return _answer(why, 400 if why else 200)


def _answer(why: str, status: int) -> web.Response:
    return web.json_response({"success": not why, "message": why}, status=status)


class CudaIpc(Receiver):
    """Let the trainer write to the engine through an inlet of the worker."""

    async def receive(self, arrival: Arrival) -> str:
        if not is_loopback(self.engine.url):
            return await arrival.sent(redact(self.engine.url))  # the trainer refuses and reports it
        async with Inlet(arrival.post) as inlet:
            return await arrival.sent(inlet.url)
