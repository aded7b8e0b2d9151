"""Bound the number and the idle time of client connections."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from penstock.weights.serving import BAD_REQUESTS
from penstock.workers.agents.gateway.metrics import Tally

#: Longest wait for the head of a request, in seconds since the connection opened or the last answer.
IDLE_S = 30.0
#: Longest wait for the rest of a refused request's body, in seconds.
LINGER_S = 2.0
#: Longest line and longest field of a request head, in bytes.
HEAD_BYTES = 16 * 1024

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


#: Most open connections of a gateway; beyond that, the oldest connection without a request is closed.
MAX_CONNECTIONS = 2048


class Connections(web.Server):
    """Serve at most ``limit`` connections; close the oldest without an authorized request to accept a new one."""

    def __init__(
        self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limit: int, tally: Tally
    ) -> None:
        super().__init__(
            answer,
            handler_cancellation=True,
            access_log=None,
            logger=BAD_REQUESTS,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )
        self._limit = limit
        self._tally = tally
        #: Connections without an authorized request, oldest first; and connections with one.
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        self._busy: dict[web.RequestHandler, asyncio.Transport] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._idle[handler] = transport
        if len(self._idle) + len(self._busy) > self._limit:
            self._tally.refused += 1
            oldest = next(iter(self._idle))
            closed = self._idle.pop(oldest)
            if oldest is handler:  # all other connections have authorized requests
                closed.write(_FULL)
                closed.close()
            else:
                closed.abort()
        self._count()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._idle.pop(handler, None)
        self._busy.pop(handler, None)
        self._count()

    def keep(self, handler: web.RequestHandler) -> None:
        """Protect a connection with an authorized request until the request is answered."""
        if (transport := self._idle.pop(handler, None)) is not None:
            self._busy[handler] = transport

    def free(self, handler: web.RequestHandler) -> None:
        """Stop protecting a connection after its request is answered."""
        if (transport := self._busy.pop(handler, None)) is not None:
            self._idle[handler] = transport

    def _count(self) -> None:
        self._tally.connections = len(self._idle) + len(self._busy)
