"""Export metrics of the recorder, and write latest records to Redis."""

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.errors import PenstockError
from penstock.history.row import SampleRow
from penstock.metrics.series import families, table
from penstock.protocol.scripts import note
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.sample import SampleStatus
from penstock.redis.control import PASSING, Control

log = logging.getLogger(__name__)

#: Shortest time between writes, in seconds; more frequent changes are coalesced.
PACE_S = 0.1
#: Longest wait for the last write on close, in seconds.
CLOSE_S = 2.0


class LatestRecord:
    """Write the latest content of a record from a thread, which starts with the first record.

    Args:
        url: address of the control Redis.
        records: name of the hash with the record.
        field: field of the hash.
    """

    def __init__(self, url: str, keys: Keys, records: str, field: str) -> None:
        self._url = url
        self._keys = keys
        self._records = records
        self._field = field
        self._latest: dict[str, Any] | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, record: Mapping[str, Any]) -> None:
        """Schedule a write of this record. Returns at once."""
        self._latest = dict(record)
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"record of {self._field}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the latest record and end the thread. Blocks at most ``CLOSE_S``."""
        self._closed.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        control = Control(self._url, stopped=self._closed.is_set, check=False)
        while not self._closed.is_set() or self._changed.is_set():
            self._changed.wait()
            self._changed.clear()
            try:
                if self._latest is not None:
                    control.call(note(self._keys, self._records, self._field, pack(self._latest)))
            except (PenstockError, *PASSING) as exc:
                log.warning("failed to write the record of %s to Redis: %s", self._field, exc)
            self._closed.wait(PACE_S)
        control.close()


#: By attribute of ``RecorderTally``.
TABLE = table("""
    groups counter recorder_groups Groups that were recorded and may be deleted.
    rows counter recorder_rows{fate} Rows that were written, by fate of the sample; after a crash, some rows count
        again.
    tokens counter recorder_generated_tokens{fate} Tokens that the policy generated for the samples of these rows.
    write_s counter recorder_write_seconds Time for writing and syncing rows, including waits for disk space.
    hook_failures counter recorder_hook_failures Calls of hooks.all_samples that raised or ran too long.
    repetitive counter recorder_repetitive_samples Recorded answers of more than 10,000 characters with a repetitive
        end.
    repetition slime rollout/repetition_frac Share of repetitive answers among the recorded ones, since this
        recorder started.
""")
SERIES = tuple(TABLE.values())

#: Length in characters of the checked end of an answer; shorter answers are not checked.
CHECKED_CHARS = 10_000
#: Compression ratio above which an answer counts as repetitive.
RATIO = 10


def is_repetitive(text: str) -> bool:
    """Return whether the end of a long text compresses by more than ``RATIO``. Takes about a millisecond."""
    if len(text) <= CHECKED_CHARS:
        return False
    end = text[-CHECKED_CHARS:].encode(errors="replace")
    return len(end) > RATIO * len(zlib.compress(end, level=9))


@dataclass(slots=True)
class RecorderTally(Collector):
    """Count the totals of one recorder."""

    groups: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    write_s: float = 0.0
    hook_failures: int = 0
    #: Rows with an answer, and rows with a repetitive answer.
    answers: int = 0
    repetitive: int = 0

    def wrote(self, rows: Sequence[SampleRow], seconds: float) -> None:
        for row in rows:
            self.rows[row.fate] += 1
            self.tokens[row.fate] += 0 if row.status == SampleStatus.GIVEN else row.num_generated
            self.answers += row.tokens is not None
            self.repetitive += is_repetitive(row.answer)
        self.write_s += seconds

    @property
    def repetition(self) -> float | None:
        return self.repetitive / self.answers if self.answers else None

    def collect(self) -> Iterator[Metric]:
        return families(TABLE, {name: getattr(self, name) for name in TABLE})
