"""Metrics of one pool of verifiers: how many there are, what they checked, and what waits for them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge

VERIFIERS = gauge("verifiers_processes", "Verifiers of this pool, by what they do.", "state")
CHECKS = counter("verifiers_checks", "Checks that its verifiers ended, those that were killed too.")
KILLED = counter("verifiers_killed_checks", "Checks that took too long, or whose process died.")
STARTS = counter("verifiers_starts", "Starts of verifiers, the first ones among them.")
QUEUED = gauge("verifiers_queued_checks", "Checks that wait for a verifier, of any pool of the run.")

SERIES = (VERIFIERS, CHECKS, KILLED, STARTS, QUEUED)


@dataclass(slots=True)
class PoolTally:
    """Running sums of one pool. Its own thread writes, whoever scrapes reads."""

    starts: int = 0
    queued: int = 0
    #: State of each verifier, by its name.
    states: dict[str, str] = field(default_factory=dict)
    #: (good, killed) of each one that is there, and of all that are gone.
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    gone: tuple[int, int] = (0, 0)

    def look(self, name: str, state: str, good: int, killed: int) -> None:
        """A verifier is there, and has made so many checks."""
        self.states = self.states | {name: state}
        self.counts = self.counts | {name: (good, killed)}

    def end(self, name: str) -> None:
        """A verifier is gone; what it did still counts."""
        good, killed = self.counts.get(name, (0, 0))
        self.gone = (self.gone[0] + good, self.gone[1] + killed)
        self.counts = {one: count for one, count in self.counts.items() if one != name}
        self.states = {one: state for one, state in self.states.items() if one != name}

    @property
    def sums(self) -> tuple[int, int]:
        """Checks that ended well, and those that were killed."""
        each = [self.gone, *self.counts.values()]
        return sum(good for good, _ in each), sum(killed for _, killed in each)


class PoolCollector(Collector):
    """Reads the sums when it is scraped. Called from the server's thread."""

    def __init__(self, tally: PoolTally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        good, killed = self._tally.sums
        yield VERIFIERS.each(Counter(self._tally.states.values()))
        yield CHECKS.of(good + killed)
        yield KILLED.of(killed)
        yield STARTS.of(self._tally.starts)
        yield QUEUED.of(self._tally.queued)
