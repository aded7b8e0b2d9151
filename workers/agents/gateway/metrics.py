"""Export the requests and connections of a gateway as metrics."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import families, table

#: By attribute of ``Tally``.
TABLE = table("""
    requests counter gateway_requests{path,status} Answered requests, by path and status.
    turn_s counter gateway_turn_seconds Time of answered turns, summed over turns.
    open_turns gauge gateway_open_turns Turns in progress.
    repeats counter gateway_repeated_requests Requests resent to a worker because the first request was lost.
    connections gauge gateway_connections Open connections of clients.
    refused counter gateway_refused_connections Connections closed to make room for others.
""")
SERIES = tuple(TABLE.values())


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
        return families(TABLE, {name: getattr(self, name) for name in TABLE})
