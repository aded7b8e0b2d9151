"""Metrics of one pool of verifiers: their number, their checks, and the queue."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

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
    """Count the checks of one pool. Its fields are written by the pool's thread, and read by the metrics server's."""

    def __init__(self) -> None:
        self.starts = self.queued = 0
        #: Presence of each running verifier, by its name; replaced, never changed.
        self.running: dict[str, dict[str, Any]] = {}
        #: Checks of verifiers that ended: those that ended well, and killed ones.
        self.ended = (0, 0)

    def end(self, name: str) -> None:
        """Record the end of a verifier; its checks still count."""
        if (last := self.running.get(name)) is not None:
            self.ended = (self.ended[0] + last["checks"], self.ended[1] + last["killed"])
        self.running = {one: record for one, record in self.running.items() if one != name}

    def collect(self) -> Iterator[Metric]:
        """Yield the totals on each scrape. Called in the server's thread."""
        running, (good, killed) = self.running.values(), self.ended
        killed += sum(one["killed"] for one in running)
        yield VERIFIERS.each(Counter(one["state"] for one in running))
        yield CHECKS.of(good + sum(one["checks"] for one in running) + killed)
        yield KILLED.of(killed)
        yield STARTS.of(self.starts)
        yield QUEUED.of(self.queued)
