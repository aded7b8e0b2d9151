"""Bound the number and the idle time of client connections of an HTTP server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

#: Longest line and longest field of a request head, in bytes.
HEAD_BYTES = 16 * 1024

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BadRequests(logging.LoggerAdapter[logging.Logger]):
    """Log malformed requests and lost clients at level DEBUG, everything else unchanged."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        is_theirs = isinstance(kwargs.get("exc_info"), HttpProcessingError | ConnectionError | TimeoutError)
        super().log(logging.DEBUG if is_theirs else level, msg, *args, **kwargs)


#: ``logger`` of a server.
BAD_REQUESTS = BadRequests(logging.getLogger(__name__), {})


class Tally(Protocol):
    """Count connections."""

    #: Open ones.
    connections: int
    #: Those that were closed because there were too many.
    refused: int


class Connections(web.Server):
    """Serve at most ``limit`` connections; close the oldest without an authorized request to accept a new one.

    Args:
        idle_s: longest wait for the head of a request, since the connection opened or the last answer.
        linger_s: longest wait for the rest of a refused request's body.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limit: int,
        tally: Tally,
        *,
        idle_s: float,
        linger_s: float,
    ) -> None:
        super().__init__(
            answer,
            handler_cancellation=True,
            access_log=None,
            logger=BAD_REQUESTS,
            keepalive_timeout=idle_s,
            lingering_time=linger_s,
            auto_decompress=False,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )
        self._limit = limit
        self.tally = tally
        #: Connections without an authorized request, oldest first; and connections with one.
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        self._busy: dict[web.RequestHandler, asyncio.Transport] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._idle[handler] = transport
        if len(self._idle) + len(self._busy) > self._limit:
            self.tally.refused += 1
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

    @property
    def open(self) -> list[asyncio.Transport]:
        """Return the open connections."""
        return [*self._idle.values(), *self._busy.values()]

    def _count(self) -> None:
        self.tally.connections = len(self._idle) + len(self._busy)
