"""Serve the folders of announced versions over HTTP, from a thread of the trainer.

    offer(version) ─> its index is the announced one ─> its files can be requested ─> verb offer_weights, repeatedly

GET and HEAD of ``/OBJECT/FILE``, with ranges, for clients with the run's token; no other files can be requested. A
connection carries one request, and is closed if the client sends none, or does not read, for ``STALL_S``.

Training does not wait for it, and its failures do not fail a publication.
"""

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import stat
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from aiohttp import web
from redis.exceptions import RedisError

from penstock.config import Config
from penstock.config.serving import ServingConfig, cannot_listen, host_in_url
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import PenstockError, PublishError
from penstock.protocol.scripts import OFFER_EVERY_S, OFFER_MS, offer_weights
from penstock.records.publication import Offer
from penstock.redis.control import AsyncControl
from penstock.system.connections import Connections
from penstock.text import format_exc, redact
from penstock.weights.index import INDEX_FILE, read_index
from penstock.weights.serving import (
    STALL_S,
    is_authorized,
    is_object,
    object_name,
    server_context,
    token_of,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Versions with other weights that are offered at once, the newest ones, and most names of them: each tick has its own.
KEPT, MAX_OFFERS = 8, 256
#: Most open connections; the oldest without the token is closed to accept a new one, which is refused if all have it.
MAX_CONNECTIONS = 256
#: Longest wait for the port; for cancelled tasks to end, and for threads that they use.
START_S, END_S = 10.0, 10.0
#: ``SO_MAX_PACING_RATE`` of Linux: the kernel limits the rate of a socket, in bytes per second.
_MAX_PACING_RATE = 47

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class FileServer:
    """Serve files from a thread until ``close``.

    Args:
        token: the run's (``token_of``).
        bytes_per_s: rate limit of all connections together; None: unlimited.

    Raises:
        ConfigError: the address cannot be bound, or its TLS settings are invalid.
    """

    def __init__(
        self, config: ServingConfig, token: str, bytes_per_s: int | None = None, reached_at: str | None = None
    ) -> None:
        #: Name of a version -> its folder, and the bytes of each file; changed in the thread only.
        self.versions: dict[str, tuple[Path, Mapping[str, int]]] = {}
        self._token, tls = token, server_context(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weights-files", daemon=True)
        self._thread.start()
        try:
            port = self.submit(self._start(config, tls, bytes_per_s)).result(START_S)
        except OSError as exc:
            self.close()
            raise cannot_listen("serving", config.host, config.port, exc) from exc
        #: URL for clients, without a trailing slash.
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://{host_in_url(config.host, reached_at)}:{port}"
        log.info("weights are served at %s", self.url)

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine in the thread. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close the server and all connections, cancel what was submitted, and end the thread. Blocks for ``END_S``."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop):  # at its end it cancels tasks and closes the loop
            self._loop.run_forever()

    async def _start(self, config: ServingConfig, tls: ssl.SSLContext | None, bytes_per_s: int | None) -> int:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening = socket.create_server(found[0][4], family=found[0][0])
        # Inherited by its connections: one whose client reads nothing for so long is closed.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
        self.connections = _Connections(self._answer, bytes_per_s)
        listening.setblocking(False)
        self._accepting = loop.create_task(self._accept(listening, tls))
        return int(listening.getsockname()[1])

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections until cancelled; then close them."""
        try:
            await self.connections.accept(listening, tls)
        finally:
            for transport in self.connections.open:
                transport.abort()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._respond(request)
        response.force_close()
        return response

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._token):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        self.connections.keep(request.protocol)
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        if request.headers.get("Accept-Encoding", "identity") != "identity":
            return web.Response(status=406)  # FileResponse would look for compressed files, which were not announced
        # The path as received, without normalization: only names of announced files are found.
        _, name, file = request.path.split("/") if request.path.count("/") == 2 else ("", "", "")
        folder, sizes = self.versions.get(name, (Path(), {}))
        if file not in sizes:
            return web.Response(status=404)
        if not await asyncio.to_thread(_is_plain, folder / file, sizes[file]):
            log.warning("%s is not served: it is not the file any more that was announced", folder / file)
            return web.Response(status=404)
        return web.FileResponse(folder / file, headers={"Content-Type": "application/octet-stream"})


class _Connections(Connections):
    """Divide ``trainer.serve_bytes_per_s`` among at most ``MAX_CONNECTIONS``."""

    def __init__(self, answer: Answer, bytes_per_s: int | None) -> None:
        tally = SimpleNamespace(connections=0, refused=0)
        super().__init__(answer, MAX_CONNECTIONS, tally, idle_s=STALL_S, linger_s=0.0)
        self._bytes_per_s = bytes_per_s

    def _count(self) -> None:
        super()._count()
        if self._bytes_per_s is not None:
            each = min(max(1, self._bytes_per_s // max(1, len(self.open))), 2**31 - 1)
            for transport in self.open:
                with suppress(OSError):  # it is being closed
                    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, each)


class StaticFiles:
    """Serve versions of one model until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.
        owner: of the subscription that publishes; nothing is offered while another trainer has it.

    Raises:
        ConfigError: the address cannot be bound, there is no token, or the TLS settings are invalid.
    """

    def __init__(self, config: Config, owner: Subscriber) -> None:
        assert config.redis.url is not None
        self._owner, self._is_owner, self._model = owner, True, config.model.name
        self._control = AsyncControl(config.redis.url)
        self._offers: dict[str, Offer] = {}
        self._turn = asyncio.Lock()
        self.server = FileServer(config.serving, token_of(config), config.trainer.serve_bytes_per_s, config.reached_at)
        self._renewing = self.server.submit(self._renew_forever())

    def offer(self, version: int, index: str, folder: Path) -> None:
        """Serve an announced version, in the background. Returns at once; errors are logged.

        Args:
            index: digest of its ``weights.index``.
        """
        self.server.submit(self._offer(version, index, folder))

    def close(self) -> None:
        """Stop serving and close all connections. Blocks briefly."""
        self.server.close()

    async def _offer(self, version: int, index: str, folder: Path) -> None:
        async with self._turn:
            try:
                sizes = await asyncio.to_thread(announced_sizes, version, index, folder)
                name = object_name(version, index)
                self._offers.pop(name, None)
                self._offers[name] = Offer(self.server.url, version, index)
                self.server.versions[name] = folder, sizes
                await self._announce(self._offers[name])
                newest = list(dict.fromkeys(offer.index for offer in reversed(self._offers.values())))[:KEPT]
                for number, (old, offer) in enumerate(reversed(list(self._offers.items()))):
                    if number >= MAX_OFFERS or offer.index not in newest:
                        await self._withdraw(old)
            except (PenstockError, RedisError, OSError, ValueError) as exc:  # a path with a NUL is the last
                _warn(exc)

    async def _renew_forever(self) -> None:
        try:
            while True:
                await asyncio.sleep(OFFER_EVERY_S)
                async with self._turn:
                    for name, offer in list(self._offers.items()):
                        try:
                            is_present = await asyncio.to_thread(self.server.versions[name][0].is_dir)
                            await (self._announce(offer) if is_present else self._withdraw(name))
                        except (PenstockError, RedisError, OSError) as exc:
                            _warn(exc)
        finally:
            with suppress(Exception):
                await self._control.close()

    async def _withdraw(self, name: str) -> None:
        """Stop serving a version; requests that have opened a file may continue."""
        del self.server.versions[name]
        await self._announce(self._offers.pop(name), ttl_ms=1)

    async def _announce(self, offer: Offer, ttl_ms: int = OFFER_MS) -> None:
        by = self._owner
        call = offer_weights(by.keys, by.name, self._model, offer, owner=by.owner, gen=by.gen, ttl_ms=ttl_ms)
        was, self._is_owner = self._is_owner, await self._control.call(call) == "offered"
        if was and not self._is_owner:
            log.warning("weights over HTTP: nothing is offered while another trainer has subscription %r", by.name)


def announced_sizes(version: int, index: str, folder: Path) -> dict[str, int]:
    """Return the bytes of the files that the announced index names, and its own; raise PublishError, OSError."""
    if not is_object(object_name(version, index)):
        raise PublishError(f"version {version} is not offered: {index!r:.100} is no digest of an index.")
    sizes = read_index(folder, index).sizes
    sizes = {**sizes, INDEX_FILE: (folder / INDEX_FILE).lstat().st_size}
    for name, size in sizes.items():
        if not _is_plain(folder / name, size):
            raise PublishError(f"version {version} is not offered: {name!r:.100} is not what its index says.")
    return sizes


def _is_plain(path: Path, size: int) -> bool:
    """Return whether this is a file of so many bytes, and no link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _warn(exc: Exception) -> None:
    log.warning("weights over HTTP: %s", redact(str(exc) if isinstance(exc, PenstockError) else format_exc(exc)))
