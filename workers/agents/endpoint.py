"""Serve the gateway's HTTP calls to a worker: open an episode, take a turn, end the episode."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from penstock.config import Config
from penstock.config.serving import host_in_url
from penstock.errors import EpisodeKeyInvalid, EpisodeMoved, EpisodeSuperseded
from penstock.protocol.episode_key import read_key
from penstock.system.connections import BAD_REQUESTS
from penstock.weights.serving import is_authorized, server_context, token_of
from penstock.workers.agents.agents import Agents
from penstock.workers.agents.episode import AgentEpisode, End, read_end
from penstock.workers.agents.requests import MAX_REQUEST_BYTES, RequestInvalid, read_request

#: Episode error -> HTTP status.
_STATUS = {RequestInvalid: 400, EpisodeKeyInvalid: 401, EpisodeMoved: 404, EpisodeSuperseded: 409}


class Endpoint:
    """Serve the episodes of one worker in its event loop."""

    def __init__(self, config: Config, agents: Agents) -> None:
        self._config, self._reached_at = config.agents, config.reached_at
        self._token = token_of(config)
        self._agents = agents
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        # The gateway encodes requests again, with their key.
        app = web.Application(client_max_size=2 * MAX_REQUEST_BYTES, middlewares=[self._checked])
        app.add_routes([
            web.post("/open", self._open),
            web.post("/turn", self._turn),
            web.post("/finish", self._finish),
            web.post("/fail", self._fail),
        ])  # fmt: skip
        # If a gateway dies during a turn, its agent sends the request again.
        self._runner = web.AppRunner(
            app, access_log=None, logger=BAD_REQUESTS, handler_cancellation=False, shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, 0, ssl_context=server_context(self._config))
        await site.start()
        port = self._runner.addresses[0][1]
        scheme = "https" if self._config.is_tls else "http"
        self.url = f"{scheme}://{host_in_url(self._config.host, self._reached_at)}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._token):
            return _error(401, "The run's token is missing or wrong: set the same token for gateway and worker.")
        try:
            return await handler(request)
        except (RequestInvalid, EpisodeKeyInvalid, EpisodeMoved, EpisodeSuperseded) as exc:
            return _error(_STATUS[type(exc)], str(exc))

    async def _open(self, _: web.Request) -> web.Response:
        found = self._agents.open()
        return web.Response(status=204) if found is None else _json(found)

    async def _turn(self, request: web.Request) -> web.Response:
        episode, body = await self._episode(request)
        return _json(await episode.ask(read_request(body, self._agents.template)))

    async def _finish(self, request: web.Request) -> web.Response:
        episode, body = await self._episode(request)
        await episode.finish(read_end(body))
        return _json({})

    async def _fail(self, request: web.Request) -> web.Response:
        episode, body = await self._episode(request)
        end = read_end(body)
        await episode.finish(End(error=end.error or "the agent gave no reason"))
        return _json({})

    async def _episode(self, request: web.Request) -> tuple[AgentEpisode, Any]:
        data = await request.read()
        # Parsing a large history takes milliseconds: let other samples' answers go first.
        await asyncio.sleep(0)
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as exc:
            raise RequestInvalid(f"the request is not JSON: {exc}") from exc
        key = body.pop("key", None) if isinstance(body, dict) else None
        if not isinstance(key, str):
            raise RequestInvalid("the request has no key: send the key of the episode")
        return self._agents.find(read_key(self._token, key)), body


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"error": text}), content_type="application/json")
