"""``penstock web`` as a process: listen on a loopback port, serve the application, until Ctrl-C or SIGTERM."""

import asyncio
import secrets
import socket
from itertools import count
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.console.terminal import say
from penstock.console.web.app import make_app
from penstock.console.web.replies import MAX_STREAMS
from penstock.errors import ConfigError

#: Most open connections: the streams, and as many others.
MAX_CONNECTIONS = 2 * MAX_STREAMS

_numbers = count()


class Connection(H11Protocol):
    """Limit the connections of the page's port, so that other processes cannot use up all file descriptors.

    Created by uvicorn. Beyond the limit, a new connection closes the oldest idle one, or else the oldest. A page whose
    stream is closed reconnects.
    """

    #: Sequence number; higher for later connections.
    number = -1

    @property
    def is_asking(self) -> bool:
        """Return whether a response to it is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others = [one for one in self.connections if isinstance(one, Connection)]
        if len(others) >= MAX_CONNECTIONS:
            min(others, key=lambda one: (one.is_asking, one.number)).end()
        self.number = next(_numbers)
        super().connection_made(transport)

    def end(self) -> None:
        """Close it at once."""
        self.connections.discard(self)
        self.transport.abort()


HOST = "127.0.0.1"
#: Streams of events last as long as their page: close them at shutdown.
_GRACE_S = 1


def serve(directory: Path, port: int, *, actions: bool) -> None:
    """Serve the runs of a folder; blocks until it is stopped.

    Args:
        port: of loopback; 0: a free one.
        actions: whether requests with the token may change a run.

    Raises:
        ConfigError: the folder does not exist, or the port cannot be used.
    """
    if not directory.is_dir():
        raise ConfigError(f"There is no folder {directory}: name that of the runs with --directory.")
    token = secrets.token_urlsafe(24) if actions else None
    with _bound(port) as listening:
        say(f"http://{HOST}:{listening.getsockname()[1]} shows the runs of {directory}; Ctrl-C ends it")
        if token is not None:
            say(f"token of actions: {token}")
        server_of(make_app(directory, token=token)).run(sockets=[listening])


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Return the HTTP server of the application."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        # Backlog of connections accepted before the limit applies.
        backlog=MAX_CONNECTIONS,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return uvicorn.Server(config)


def _bound(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A server that was just stopped leaves connections behind, which block the port for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        # From here on clients are answered, with a short delay at most.
        listening.listen()
    except OSError as exc:
        listening.close()
        raise ConfigError(f"--port {port} cannot be had ({exc.strerror}): name another one, or 0 for any.") from exc
    return listening
