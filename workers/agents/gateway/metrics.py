"""Export the requests and connections of a gateway as metrics."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import counter, gauge

REQUESTS = counter("gateway_requests", "Answered requests, by path and status.", "path", "status")
TURN_SECONDS = counter("gateway_turn_seconds", "Time of answered turns, summed over turns.")
OPEN_TURNS = gauge("gateway_open_turns", "Turns in progress.")
REPEATS = counter("gateway_repeated_requests", "Requests resent to a worker because the first request was lost.")
CONNECTIONS = gauge("gateway_connections", "Open connections of clients.")
REFUSED = counter("gateway_refused_connections", "Connections closed to make room for others.")

SERIES = (REQUESTS, TURN_SECONDS, OPEN_TURNS, REPEATS, CONNECTIONS, REFUSED)


@dataclass(slots=True)
class Tally(Collector):
    """Count totals of one gateway; written by its event loop, read by the metrics server's thread."""

    #: (path, status) -> number of requests.
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    turn_s: float = 0.0
    open_turns: int = 0
    repeats: int = 0
    connections: int = 0
    refused: int = 0

    def collect(self) -> Iterator[Metric]:
        yield REQUESTS.each(list(self.requests.items()))
        yield TURN_SECONDS.of(self.turn_s)
        yield OPEN_TURNS.of(self.open_turns)
        yield REPEATS.of(self.repeats)
        yield CONNECTIONS.of(self.connections)
        yield REFUSED.of(self.refused)
