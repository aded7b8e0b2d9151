"""Serve the requests of one sample on a loopback address, in the form of SGLang's ``/generate``.

slime's functions send requests to ``http://{args.sglang_router_ip}:{args.sglang_router_port}/generate``. Each sample
has its own address, so that all tokens generated there belong to it.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.errors import ConfigError, EngineError
from penstock.weights.http.bad_requests import BAD_REQUESTS
from penstock.workers.hooks.draws import Draws

#: Largest request in bytes.
MAX_BYTES = 16 * 1024 * 1024
HOST = "127.0.0.1"

log = logging.getLogger(__name__)


@asynccontextmanager
async def door(draws: Draws) -> AsyncIterator[int]:
    """Serve ``draws`` inside the ``async with``; yield the port."""
    app = web.Application(client_max_size=MAX_BYTES)

    async def generate(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _answer(draws, await request.json()))
        except (ConfigError, ValueError, RecursionError) as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=400)
        except EngineError as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=503)

    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app, access_log=None, logger=BAD_REQUESTS, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _answer(draws: Draws, body: Any) -> dict[str, Any]:
    """Answer a request. Raises ConfigError if it does not ask for one answer."""
    if not isinstance(body, dict):
        raise ConfigError("a request is a map with input_ids or text.")
    if body.get("stream") or isinstance(body.get("rid"), list):
        raise ConfigError("answers are complete and single: leave stream out, and ask for one prompt at a time.")
    asked, sampling = body.get("input_ids", body.get("text")), body.get("sampling_params") or {}
    if not isinstance(asked, (list, str)) or not isinstance(sampling, dict):
        raise ConfigError("give input_ids, a list of token ids, or text, and sampling_params as a map.")
    if set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"}:
        extra = sorted(set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"})
        raise ConfigError(f"a custom generate function cannot ask for {', '.join(map(str, extra))[:200]}.")
    return await draws.generate(asked, sampling)
