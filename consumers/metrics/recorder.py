"""Metrics of the recorder: samples recorded, and their tokens by fate."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.history.row import SampleRow
from penstock.protocol.records.sample import SampleStatus
from penstock.system.metrics.series import counter

GROUPS = counter("recorder_groups", "Groups that were recorded, so that they may be swept.")
ROWS = counter("recorder_rows", "Rows that were written, by what became of the sample; again after a kill.", "fate")
TOKENS = counter("recorder_generated_tokens", "Tokens that the policy generated for the samples of these rows.", "fate")
SECONDS = counter("recorder_write_seconds", "Time for writing and syncing them, waits for room among it.")

FAILURES = counter("recorder_hook_failures", "Calls of hooks.all_samples that raised or ran too long.")

SERIES = (GROUPS, ROWS, TOKENS, SECONDS, FAILURES)


@dataclass(slots=True)
class RecorderTally:
    """Running sums of one recorder."""

    groups: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    write_s: float = 0.0
    hook_failures: int = 0

    def wrote(self, rows: Sequence[SampleRow], seconds: float) -> None:
        for row in rows:
            self.rows[row.fate] += 1
            self.tokens[row.fate] += 0 if row.status == SampleStatus.GIVEN else row.num_generated
        self.write_s += seconds


class RecorderCollector(Collector):
    """Reads the sums when it is scraped. Called from the server's thread."""

    def __init__(self, tally: RecorderTally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        yield GROUPS.of(tally.groups)
        yield ROWS.each(list(tally.rows.items()))
        yield TOKENS.each(list(tally.tokens.items()))
        yield SECONDS.of(tally.write_s)
        yield FAILURES.of(tally.hook_failures)
