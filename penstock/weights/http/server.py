"""Serve weights over HTTP: GET and HEAD of ranges of ``/OBJECT/FILE`` on a shelf, to clients with the run's token.

A connection carries one request and is closed if no head arrives, or no bytes move, for ``serving.stall_s``. If
``serving.max_connections`` are open, the oldest that has not presented the token is closed. Trainer and workers use the
same class.
"""

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from uvloop import new_event_loop

from penstock.config.serving import ServingConfig, cannot_listen, host_in_url
from penstock.weights.http.blobs import AnyBlob, Read, Shelf
from penstock.weights.http.token import is_authorized, server_context

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest wait for cancelled tasks to end.
END_S = 5.0


class LoopThread:
    """Run coroutines in a thread until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine in the thread. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running tasks and end the thread. Blocks for at most twice ``END_S``."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


#: Size of the bucket: bytes that may be sent at once after a pause, in seconds of the rate.
BURST_S = 0.1


class Rate:
    """Limit the rate of sent bytes by a token bucket. For one event loop.

    Args:
        bytes_per_s: None: unlimited.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._per_s = bytes_per_s
        #: Time (monotonic, s) at which all taken bytes are paid for.
        self._free_at = 0.0
        self._turn = asyncio.Lock()

    async def take(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` more may be sent, first come, first served. A cancelled call takes nothing."""
        if self._per_s is None:
            return
        async with self._turn:
            now = time.monotonic()
            free_at = max(self._free_at, now - BURST_S) + num_bytes / self._per_s
            if free_at > now:
                await asyncio.sleep(free_at - now)
            self._free_at = free_at


class BadRequests(logging.LoggerAdapter[logging.Logger]):
    """Log malformed requests and lost clients at level DEBUG, everything else unchanged."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        is_theirs = isinstance(kwargs.get("exc_info"), HttpProcessingError | ConnectionError)
        super().log(logging.DEBUG if is_theirs else level, msg, *args, **kwargs)


#: ``logger`` of a server.
BAD_REQUESTS = BadRequests(logging.getLogger(__name__), {})


#: Least time between warnings about closed connections.
SAY_S = 60.0


class _Waiting(NamedTuple):
    """Hold a connection that has not presented the token yet."""

    cut: Callable[[], None]
    #: Closes the connection when its time is over.
    timer: asyncio.TimerHandle


class Places:
    """Limit the number of open connections. For one event loop.

    Args:
        most: most connections open at once.
        proof_s: a connection that has not presented the token after this time is closed.
    """

    def __init__(self, most: int, proof_s: float) -> None:
        self._most, self._proof_s = most, proof_s
        #: The oldest first.
        self._waiting: dict[Hashable, _Waiting] = {}
        self._proven: set[Hashable] = set()
        self._num_cut = 0
        self._warned_s = float("-inf")

    def __contains__(self, who: Hashable) -> bool:
        return who in self._waiting or who in self._proven

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._waiting) + len(self._proven)

    def take(self, who: Hashable, cut: Callable[[], None]) -> bool:
        """Give a connection a place; if none is free, close the oldest that has not presented the token.

        Args:
            cut: closes the connection without blocking; ``leave`` need not be called then.

        Returns:
            False if all open connections have presented the token: close this one.
        """
        if len(self) >= self._most:
            if not self._waiting:
                return False
            self._warn()
            self.cut(next(iter(self._waiting)))
        timer = asyncio.get_running_loop().call_later(self._proof_s, self.cut, who)
        self._waiting[who] = _Waiting(cut, timer)
        return True

    def prove(self, who: Hashable) -> None:
        """Keep the place of a connection that presented the token until it leaves."""
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()
            self._proven.add(who)

    def cut(self, who: Hashable) -> None:
        """Close a connection unless it has presented the token."""
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()
            one.cut()

    def leave(self, who: Hashable) -> None:
        """Free the place of a connection that ended."""
        self._proven.discard(who)
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()

    def _warn(self) -> None:
        self._num_cut += 1
        if time.monotonic() - self._warned_s >= SAY_S:
            self._warned_s = time.monotonic()
            log.warning(
                "all %d places for weights are taken (serving.max_connections): connections that have not shown the "
                "token are cut, %d so far",
                self._most,
                self._num_cut,
            )


Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


#: Bytes that are read and sent at once, within ``serving.stall_s``.
CHUNK_BYTES = 256 * 1024
#: Longest head of a request.
HEAD_BYTES = 8 * 1024
#: Longest wait for the port.
START_S = 10.0
#: Pause after a failed accept, for instance without a free file handle.
AGAIN_S = 0.1


class WeightsServer:
    """Serve a shelf from a thread until ``close``.

    Args:
        token: the run's (``token_of``).
        bytes_per_s: rate limit of all connections together; None: unlimited.

    Raises:
        ConfigError: the address cannot be bound, or its TLS settings are invalid.
    """

    def __init__(self, config: ServingConfig, token: str, *, bytes_per_s: int | None = None) -> None:
        self.shelf = Shelf()
        #: Bytes of bodies sent so far.
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
        #: URL for clients, without a trailing slash.
        self.url = f"{'http' if tls is None else 'https'}://{host_in_url(config.host, config.reached_at)}:{port}"
        log.info("weights are served at %s", self.url)

    def close(self) -> None:
        """Close the server and all connections. Blocks shortly."""
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
        """Accept TLS connections and count them from the start; asyncio's own server shows them after the handshake."""
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
        # The path as received, without normalization.
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
            # The client detects the truncation by Content-Length.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("a client was cut off") from exc
        return response


class _Server(web.Server):
    """Free the places of connections that end."""

    def __init__(self, answer: Answer, places: Places, **options: Any) -> None:
        super().__init__(answer, **options)
        self._places = places

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if handler not in self._places:
            transport.abort()  # it lost its place during the handshake

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._places.leave(handler)
        super().connection_lost(handler, exc)


class _Refused(asyncio.Protocol):
    """Close a connection at once because no place is free."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _span(request: web.BaseRequest, size: int) -> tuple[int, int] | None:
    """Return the requested range, end exclusive; None if it cannot be satisfied."""
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
