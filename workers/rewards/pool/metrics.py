"""Metrics of one pool of verifiers: their number, their checks, and the queue."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import counter, gauge

VERIFIERS = gauge("verifiers_processes", "Verifiers of this pool, by state.", "state")
CHECKS = counter("verifiers_checks", "Finished checks of its verifiers, killed ones included.")
KILLED = counter("verifiers_killed_checks", "Checks that took too long, or whose process died.")
STARTS = counter("verifiers_starts", "Starts of verifiers, the first ones included.")
QUEUED = gauge("verifiers_queued_checks", "Checks that wait for a verifier, of any pool of the run.")

SERIES = (VERIFIERS, CHECKS, KILLED, STARTS, QUEUED)


@dataclass(slots=True)
class PoolTally:
    """Running totals of one pool. Written by its own thread, read by the metrics server's."""

    starts: int = 0
    queued: int = 0
    #: State of each verifier, by its name.
    states: dict[str, str] = field(default_factory=dict)
    #: (good, killed) of each running verifier, and of all that ended.
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    gone: tuple[int, int] = (0, 0)

    def look(self, name: str, state: str, good: int, killed: int) -> None:
        """Record the state and the number of checks of a running verifier."""
        self.states = self.states | {name: state}
        self.counts = self.counts | {name: (good, killed)}

    def end(self, name: str) -> None:
        """Record the end of a verifier; its checks still count."""
        good, killed = self.counts.get(name, (0, 0))
        self.gone = (self.gone[0] + good, self.gone[1] + killed)
        self.counts = {one: count for one, count in self.counts.items() if one != name}
        self.states = {one: state for one, state in self.states.items() if one != name}

    @property
    def sums(self) -> tuple[int, int]:
        """Number of checks that ended well, and of killed ones."""
        each = [self.gone, *self.counts.values()]
        return sum(good for good, _ in each), sum(killed for _, killed in each)


class PoolCollector(Collector):
    """Read the totals on each scrape. Called in the server's thread."""

    def __init__(self, tally: PoolTally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        good, killed = self._tally.sums
        yield VERIFIERS.each(Counter(self._tally.states.values()))
        yield CHECKS.of(good + killed)
        yield KILLED.of(killed)
        yield STARTS.of(self._tally.starts)
        yield QUEUED.of(self._tally.queued)
