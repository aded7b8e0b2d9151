"""Limit the connections of the page's port, or any process that reaches it could use up all file descriptors.

Beyond the limit, a new connection closes the oldest idle one, or else the oldest. A page whose stream is closed
reconnects.
"""

import asyncio
from itertools import count

from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.console.web.events import MAX_STREAMS

#: Most open connections: the streams, and as many others.
MAX_CONNECTIONS = 2 * MAX_STREAMS

_numbers = count()


class Connection(H11Protocol):
    """A connection, created by uvicorn."""

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
