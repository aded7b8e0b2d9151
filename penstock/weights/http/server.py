"""The server of weights: GET and HEAD of ranges of what is on a shelf, ``/OBJECT/FILE``, for who has the run's token.

A connection carries one request, so that none is held open for nothing: its head must come, and its bytes move, within
``serving.stall_s``, or it is cut. Where ``serving.max_connections`` are open, the oldest that has not shown the token
makes room (places.py). Trainer and workers serve by this same class.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, cast

from aiohttp import web

from penstock.config.net.hosts import cannot_listen, host_in_url
from penstock.config.net.serving import ServingConfig
from penstock.weights.http.bad_requests import BAD_REQUESTS
from penstock.weights.http.blobs import AnyBlob, Read, Shelf
from penstock.weights.http.loop_thread import LoopThread
from penstock.weights.http.places import Places
from penstock.weights.http.rate import Rate
from penstock.weights.http.tls import server_context
from penstock.weights.http.token import is_authorized

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

#: Bytes that are read and sent at once; each must go within ``serving.stall_s``.
CHUNK_BYTES = 256 * 1024
#: Longest head of a request.
HEAD_BYTES = 8 * 1024
#: Longest wait for the port.
START_S = 10.0
#: Pause where no connection can be taken, as without a free handle.
AGAIN_S = 0.1


class WeightsServer:
    """Serves a shelf from a thread of its own until ``close``.

    Args:
        token: the run's (``token_of``).
        bytes_per_s: most that is sent to all together; None: no bound.

    Raises:
        ConfigError: the address cannot be listened on, or its TLS will not do.
    """

    def __init__(self, config: ServingConfig, token: str, *, bytes_per_s: int | None = None) -> None:
        #: What is served.
        self.shelf = Shelf()
        #: Bytes of bodies that were sent.
        self.sent_bytes = 0
        self._config = config
        self._token = token
        self._rate = Rate(bytes_per_s)
        self._places = Places(config.max_connections, config.stall_s)
        tls = server_context(config)
        self._thread = LoopThread("weights-server")
        try:
            port = self._thread.submit(self._start(tls)).result(START_S)
        except OSError as exc:
            self._thread.close()
            raise cannot_listen("serving", config.host, config.port, exc) from exc
        #: Where others reach it; no slash at its end.
        self.url = f"{'http' if tls is None else 'https'}://{host_in_url(config.host, config.reached_at)}:{port}"
        log.info("weights are served at %s", self.url)

    def close(self) -> None:
        """Serve no more; connections are cut. Blocks shortly."""
        self._thread.close()

    async def _start(self, tls: ssl.SSLContext | None) -> int:
        config = self._config
        server = _Server(
            self._answer,
            self._places,
            handler_cancellation=True,
            access_log=None,
            logger=BAD_REQUESTS,
            lingering_time=0.0,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )

        def connection() -> asyncio.Protocol:
            handler = server()
            return handler if self._places.take(handler, lambda: _abort(handler)) else _Refused()

        loop = asyncio.get_running_loop()
        if tls is not None:
            found = await loop.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            place = socket.create_server(found[0][4], family=found[0][0])
            place.setblocking(False)
            self._accepting = loop.create_task(self._accept(place, server, tls))
            return int(place.getsockname()[1])
        listening = await loop.create_server(connection, config.host, config.port)
        return int(listening.sockets[0].getsockname()[1])

    async def _accept(self, place: socket.socket, server: "_Server", tls: ssl.SSLContext) -> None:
        """Take connections for TLS. They count from now on; a loop that serves TLS counts none before its handshake."""
        loop, shaking = asyncio.get_running_loop(), dict[web.RequestHandler, asyncio.Task[None]]()

        def cut(handler: web.RequestHandler, plain: socket.socket) -> None:
            if (task := shaking.get(handler)) is not None:
                task.cancel()
                plain.close()
            _abort(handler)

        with place:
            while True:
                try:
                    plain, _ = await loop.sock_accept(place)
                except OSError as exc:
                    log.warning("a connection cannot be taken: %s", exc)
                    await asyncio.sleep(AGAIN_S)
                    continue
                handler = server()
                if not self._places.take(handler, partial(cut, handler, plain)):
                    plain.close()
                    continue
                task = shaking[handler] = loop.create_task(self._shake(plain, handler, tls))
                task.add_done_callback(lambda _, handler=handler: shaking.pop(handler))  # type: ignore[misc]

    async def _shake(self, plain: socket.socket, handler: web.RequestHandler, tls: ssl.SSLContext) -> None:
        with suppress(OSError):
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: handler, plain, ssl=tls, ssl_handshake_timeout=self._config.stall_s
                )
            except BaseException:
                plain.close()
                self._places.leave(handler)
                raise

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._respond(request)
        response.force_close()
        return response

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._token):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        self._places.prove(request.protocol)
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        blob = self._find(request.path)
        if blob is None:
            return web.Response(status=404)
        span = _span(request, blob.size)
        if span is None:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{blob.size}"})
        if not blob.has(*span):
            return web.Response(status=404)
        try:
            with blob.opened() as read:
                return await self._send(request, read, span, blob.size)
        except OSError as exc:
            if isinstance(exc, ConnectionError):
                raise
            log.warning("%s is not served: %s", request.path, exc)
            return web.Response(status=404)

    def _find(self, path: str) -> AnyBlob | None:
        parts = PurePosixPath(path).parts
        # As it came: what is no object's and file's own name is looked up nowhere.
        if len(parts) != 3 or path != f"/{parts[1]}/{parts[2]}":
            return None
        return self.shelf.find(parts[1], parts[2])

    async def _send(self, request: web.BaseRequest, read: Read, span: tuple[int, int], size: int) -> web.StreamResponse:
        start, end = span
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        response.force_close()
        response.content_length = end - start
        response.content_type = "application/octet-stream"
        response.headers["Accept-Ranges"] = "bytes"
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            while start < end:
                chunk = await asyncio.to_thread(read, start, min(CHUNK_BYTES, end - start))
                if not chunk:
                    raise OSError("it became shorter")
                await self._rate.take(len(chunk))
                async with asyncio.timeout(self._config.stall_s):
                    await response.write(chunk)
                start += len(chunk)
                self.sent_bytes += len(chunk)
            async with asyncio.timeout(self._config.stall_s):
                await response.write_eof()
        except (TimeoutError, OSError) as exc:
            if not isinstance(exc, TimeoutError | ConnectionError):
                log.warning("%s is not served to its end: %s", request.path, exc)
            # The head said how many bytes come: whoever gets fewer sees it.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("a client was cut off") from exc
        return response


class _Server(web.Server):
    """Has connections leave their places as they end."""

    def __init__(self, answer: Answer, places: Places, **options: Any) -> None:
        super().__init__(answer, **options)
        self._places = places

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if handler not in self._places:
            transport.abort()  # it lost its place before it was there

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._places.leave(handler)
        super().connection_lost(handler, exc)


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _span(request: web.BaseRequest, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last that are asked for; None where there are none such."""
    try:
        asked = request.http_range
    except ValueError:
        return None
    start, end = asked.start, asked.stop
    if start is None and end is None:
        return 0, size
    if start is not None and start < 0:
        start, end = max(size + start, 0), size
    start, end = start or 0, size if end is None else min(end, size)
    return (start, end) if 0 <= start < end else None
