"""A real gateway before workers that a test plays: each has an HTTP endpoint, and a presence record in Redis."""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis
from aiohttp import web

from penstock.config import Config
from penstock.protocol.episode_key import make_key
from penstock.protocol.presence import WorkerPresence
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.workers.agents.gateway.main import Gateway
from tests.integration.parts import make_config

#: Token of the test's run, and that of a client.
TOKEN, CLIENT = "run-token-0123456789", "client-token-0123456789"
JOB = "d/0/7"

CALL = {"id": "call_1", "name": "search", "arguments": '{"query": "penstock", "most": 3}'}


def turn(**changes: Any) -> dict[str, Any]:
    """A worker's answer to ``/turn``."""
    answer = {
        "turn": "7-0-1",
        "content": "Hello.",
        "reasoning": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "version": 5,
        "tokens": [21, 22, 23],
        "logprobs": [-0.5, -0.25, -1.0],
    }
    return answer | changes


@dataclass
class Asked:
    """A request to a played worker; the test answers it."""

    path: str
    body: dict[str, Any]
    reply: asyncio.Future[web.Response]

    def answer(self, body: dict[str, Any] | None = None, status: int = 200) -> None:
        self.reply.set_result(web.json_response(turn() if body is None else body, status=status))


@dataclass
class PlayedWorker:
    """A worker's endpoint. A request waits in ``asked`` unless ``reply`` answers it."""

    client: redis.Redis
    keys: Keys
    name: str
    reply: Callable[[str, dict[str, Any]], web.Response | None] = lambda path, body: None
    asked: "asyncio.Queue[Asked]" = field(default_factory=asyncio.Queue)
    tls: ssl.SSLContext | None = None
    url: str = ""
    #: Requests that arrived, authorized or not.
    num_requests: int = 0

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Self]:
        runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        self._runner = runner
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        self.show()
        yield self
        await self.die()

    async def die(self) -> None:
        """Close all connections, as the kernel does for a killed process; the records stay."""
        await self._runner.cleanup()

    def show(self, **changes: Any) -> None:
        """Write the presence record."""
        shown = WorkerPresence(name=self.name, at=time.time(), state="serving", agents_url=self.url).to_record()
        self.client.hset(self.keys.workers, self.name, pack(shown | changes))

    def hold(self, job: str = JOB, state: str = "leased") -> None:
        """Lease a job."""
        self.client.hset(self.keys.group(job), mapping={"st": state, "own": self.name})

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.num_requests += 1
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "no token"}, status=401)
        body = json.loads(await request.read())
        if (reply := self.reply(request.path, body)) is not None:
            return reply
        asked = Asked(request.path, body, asyncio.get_running_loop().create_future())
        self.asked.put_nowait(asked)
        return await asked.reply


def gateway_config(url: str, keys: Keys, folder: Path, **agents: Any) -> Config:
    return make_config(
        url, keys.run, folder, serving={"token": TOKEN}, agents={"port": 0, "clients": {"me": CLIENT}} | agents
    )


@contextlib.asynccontextmanager
async def gateway(config: Config) -> AsyncIterator[str]:
    """Run a gateway; yield its address, without a path."""
    async with (await asyncio.to_thread(Gateway, config)).serving() as url:
        yield url.removesuffix("/v1")


def key_of(job: str = JOB, k: int = 0, nonce: str = "n") -> str:
    return make_key(TOKEN, job, k, 0, nonce)
