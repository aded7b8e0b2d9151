"""Metrics of one pool of verifiers: their number, their checks, and the queue."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import counter, gauge

VERIFIERS = gauge("verifiers_processes", "Verifiers of this pool, by state.", "state")
CHECKS = counter("verifiers_checks", "Finished checks of the pool's verifiers, including killed ones.")
KILLED = counter("verifiers_killed_checks", "Checks that took too long, or whose process died.")
STARTS = counter("verifiers_starts", "Starts of verifiers, including the first ones.")
QUEUED = gauge("verifiers_queued_checks", "Checks that wait for a verifier, in any pool of the run.")

SERIES = (VERIFIERS, CHECKS, KILLED, STARTS, QUEUED)


class PoolCollector(Collector):
    """Count the checks of one pool. Written by its own thread, read by the metrics server's."""

    def __init__(self) -> None:
        self.starts = self.queued = 0
        #: State, checks that ended well and killed ones of each running verifier, by its name.
        self._running: dict[str, tuple[str, int, int]] = {}
        #: The same two numbers of all that ended.
        self._ended = (0, 0)

    def look(self, name: str, state: str, good: int, killed: int) -> None:
        """Record the state and the number of checks of a running verifier."""
        self._running = self._running | {name: (state, good, killed)}

    def end(self, name: str) -> None:
        """Record the end of a verifier; its checks still count."""
        _, good, killed = self._running.get(name, ("", 0, 0))
        self._ended = (self._ended[0] + good, self._ended[1] + killed)
        self._running = {one: about for one, about in self._running.items() if one != name}

    def collect(self) -> Iterator[Metric]:
        """Yield the totals on each scrape. Called in the server's thread."""
        running, (good, killed) = self._running.values(), self._ended
        killed += sum(one[2] for one in running)
        yield VERIFIERS.each(Counter(state for state, _, _ in running))
        yield CHECKS.of(good + sum(one[1] for one in running) + killed)
        yield KILLED.of(killed)
        yield STARTS.of(self.starts)
        yield QUEUED.of(self.queued)
