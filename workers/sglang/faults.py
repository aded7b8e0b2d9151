"""Inject faults: a proxy between one worker and its engine that breaks requests for tokens, for tests and drills.

Only ``/generate`` goes through it, over its own socket on loopback, so the consequences are those of a real fault: the
same timeouts, lost connections, charged attempts and restarts. Configured by ``faults``, off by default.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from penstock.config import FaultsConfig
from penstock.workers.sglang.http import open_session

log = logging.getLogger(__name__)

_NUM_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
#: Largest request that is forwarded.
_MAX_BODY_BYTES = 1 << 30


class FaultyPath:
    """Serve at ``url`` from :meth:`up` to :meth:`close`. All methods belong to one event loop.

    Args:
        kill: kills the engine like ``kill -9``; None for an external engine: its connections are cut instead.
    """

    def __init__(self, faults: FaultsConfig, kill: Callable[[], None] | None) -> None:
        self.url = ""
        self._faults = faults
        self._kill = kill
        self._num_requests = 0
        #: Tokens generated since the engine was last killed.
        self._num_tokens = 0
        #: Connections of requests in flight.
        self._open: list[web.Request] = []
        self._target = ""
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def up(self, target: str) -> None:
        """Listen, and forward to the server at ``target``."""
        self._target = target
        self._session = open_session(auto_decompress=False)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        # Cancel the request when its client disconnects, so that SGLang aborts it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        log.warning("faults are injected between this worker and its engine: %s", self._faults.model_dump())

    async def close(self) -> None:
        """Stop listening; requests in flight are cut."""
        self._cut()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _due(self) -> str:
        self._num_requests += 1
        for name in ("error", "hang", "garbage", "short_logprobs"):
            every = getattr(self._faults, f"{name}_every")
            if every and self._num_requests % every == 0:
                log.warning("fault: request %d for tokens gets %s", self._num_requests, name)
                return name
        return ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, fault = await request.read(), self._due()
        self._open.append(request)
        try:
            if fault == "error":
                response = web.json_response({"error": {"message": "an injected fault"}}, status=500)
                response.force_close()
                return response
            if fault == "hang":
                await asyncio.Event().wait()
            return await self._forward(request, body, fault)
        finally:
            self._open.remove(request)

    async def _forward(self, request: web.Request, body: bytes, fault: str) -> web.StreamResponse:
        assert self._session is not None
        drawn = 0
        try:
            async with self._session.post(self._target + "/generate", data=body, headers=_JSON) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                # A request on a used connection would be sent again when that is cut.
                response.force_close()
                await response.prepare(request)
                # Complete lines: a server-sent event is one, and so is an answer without a stream.
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        drawn = self._count(line, drawn)
                        await response.write(_corrupt(line, fault) + b"\n")
                self._count(rest, drawn)
                await response.write(_corrupt(rest, fault))
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            # The engine was lost: close this connection too.
            _abort(request)
            raise web.HTTPBadGateway from None

    def _count(self, line: bytes, before: int) -> int:
        """Return the tokens of this request so far; kill the engine after ``die_after_tokens`` in total."""
        found = _NUM_TOKENS.findall(line)
        drawn = int(found[-1]) if found else before
        self._num_tokens += max(0, drawn - before)
        if self._faults.die_after_tokens and self._num_tokens >= self._faults.die_after_tokens:
            log.warning("fault: the engine is lost after %d tokens", self._num_tokens)
            self._num_tokens = 0
            if self._kill is None:
                self._cut()
            else:
                self._kill()
        return drawn

    def _cut(self) -> None:
        for request in self._open:
            _abort(request)


_JSON = {"Content-Type": "application/json"}


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _corrupt(line: bytes, fault: str) -> bytes:
    """Return one line of an answer: unchanged, not JSON, or with one logprob fewer."""
    if fault not in ("garbage", "short_logprobs") or not line.strip() or line.strip() == b"data: [DONE]":
        return line
    prefix = b"data: " if line.startswith(b"data: ") else b""
    if fault == "garbage":
        return prefix + b"<html>"
    try:
        answer: dict[str, Any] = orjson.loads(line.removeprefix(prefix))
        answer["meta_info"]["output_token_logprobs"].pop()
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
        return line  # an error, or an event without logprobs
    return prefix + orjson.dumps(answer)
