"""Metrics of one scorer: requests and their durations."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge

CALLS = counter("scorer_calls", "Calls that ended, those that failed too.")
FAILED = counter("scorer_failed_calls", "Calls that raised.")
SEQUENCES = counter("scorer_sequences", "Sequences that were scored.")
TOKENS = counter("scorer_tokens", "Tokens of these sequences, those before the start too.")
SECONDS = counter("scorer_seconds", "Time in calls.")
ASKED = gauge("scorer_asked_sequences", "Sequences of the call that is running; 0 where none is.")

SERIES = (CALLS, FAILED, SEQUENCES, TOKENS, SECONDS, ASKED)


@dataclass(slots=True)
class ScorerTally:
    """Running sums of one scorer."""

    calls: int = 0
    failed: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    asked: int = 0

    @contextmanager
    def call(self, lengths: list[int]) -> Iterator[None]:
        """Count one call that scores sequences of these lengths."""
        began, self.asked = time.monotonic(), len(lengths)
        try:
            yield
        except BaseException:
            self.failed += 1
            raise
        else:
            self.sequences += len(lengths)
            self.tokens += sum(lengths)
        finally:
            self.calls += 1
            self.seconds += time.monotonic() - began
            self.asked = 0


class ScorerCollector(Collector):
    """Reads the sums when it is scraped. Called from the server's thread."""

    def __init__(self, tally: ScorerTally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        yield CALLS.of(tally.calls)
        yield FAILED.of(tally.failed)
        yield SEQUENCES.of(tally.sequences)
        yield TOKENS.of(tally.tokens)
        yield SECONDS.of(tally.seconds)
        yield ASKED.of(tally.asked)
