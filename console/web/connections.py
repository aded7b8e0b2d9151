"""The connections of the page's port: no more than so many, or whoever reaches it takes every handle of the process.

Where all are taken one more ends the oldest that asks nothing just now, or else the oldest. A page whose stream is cut
opens another.
"""

import asyncio
from itertools import count

from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.console.web.events import MAX_STREAMS

#: Connections that are open at once: the streams, and as many beside them.
MAX_CONNECTIONS = 2 * MAX_STREAMS

_numbers = count()


class Connection(H11Protocol):
    """One of them, as uvicorn makes it."""

    #: A later one has a higher number.
    number = -1

    @property
    def is_asking(self) -> bool:
        """Whether a request of it is not answered to its end."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others = [one for one in self.connections if isinstance(one, Connection)]
        if len(others) >= MAX_CONNECTIONS:
            min(others, key=lambda one: (one.is_asking, one.number)).end()
        self.number = next(_numbers)
        super().connection_made(transport)

    def end(self) -> None:
        """Cut it, without a wait."""
        self.connections.discard(self)
        self.transport.abort()
