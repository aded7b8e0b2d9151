"""Bound the number and the idle time of client connections of an HTTP server."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

#: Longest line and longest field of a request head, in bytes.
HEAD_BYTES = 16 * 1024

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


#: Pause after a failed accept, for instance without a free file handle.
RETRY_S = 0.1

log = logging.getLogger(__name__)


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

    At most ``limit`` more are in their TLS handshake; the oldest is closed to accept a new one.

    Args:
        idle_s: longest TLS handshake, and longest wait for the head of a request, since the connection opened or the
            last answer.
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
        self._idle_s = idle_s
        self.tally = tally
        #: Connections in their handshake, the oldest first.
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        #: Connections without an authorized request, oldest first; and connections with one.
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        self._busy: dict[web.RequestHandler, asyncio.Transport] = {}

    async def accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections of a non-blocking socket until cancelled; then close it and those in their handshake."""
        loop, is_failing = asyncio.get_running_loop(), False
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError as exc:
                    log.log(logging.DEBUG if is_failing else logging.WARNING, "failed to accept a connection: %s", exc)
                    is_failing = True
                    await asyncio.sleep(RETRY_S)
                    continue
                is_failing = False
                task = loop.create_task(self._start(accepted, tls))
                self._handshakes[task] = accepted
                task.add_done_callback(lambda task: self._handshakes.pop(task, None))
                if len(self._handshakes) > self._limit:
                    self.tally.refused += 1
                    with suppress(OSError):  # the client has closed it
                        # Its transport reads the end, and closes it.
                        self._handshakes.pop(next(iter(self._handshakes))).shutdown(socket.SHUT_RDWR)
                await asyncio.sleep(0)  # the task has begun
        finally:
            listening.close()
            for task in self._handshakes:
                task.cancel()

    async def _start(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        limit_s = self._idle_s if tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self, accepted, ssl=tls, ssl_handshake_timeout=limit_s
            )
        except OSError as exc:
            log.debug("connection closed: %s", exc)

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
