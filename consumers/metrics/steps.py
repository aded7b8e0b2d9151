"""Record every batch that a trainer commits in ``steps.jsonl``, in the trainer's Redis record, and in trackers.

    hand_out ─> commit: start the row ─> publishing, report: add times and metrics ─> finish

The trainer client makes these calls, so any loop is recorded. A row is written before a checkpoint, so every step in a
checkpoint has a row. Metrics are added until the next batch is delivered, and the publication time until the next
commit, because weights published while the next batch is trained belong to the last committed batch. Then the row is
finished, at the latest at the end. A row that changed after it was written is written again: the last row of a step
counts (``read_rows``).
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.consumers.metrics.recorder import LatestRecord
from penstock.consumers.metrics.tally import Tally, lengths_of, same_rewards, truncated_ratio
from penstock.errors import DiskFull
from penstock.records.manifest import Manifest, first_rows
from penstock.system.disk import append
from penstock.text import utf8_safe

if TYPE_CHECKING:
    from penstock.consumers.grpo.trackers.trackers import Trackers

log = logging.getLogger(__name__)

#: Most characters of a reported string.
MAX_TEXT = 1000


def batch_figures(manifest: Manifest) -> dict[str, Any]:
    """Return standard metrics of a batch: version, rewards, staleness, counts; None for the mean of no values."""
    rows = manifest.samples()
    rewards = [one.reward for one in first_rows(rows)]
    return {
        "version": manifest.train_version,
        "batch": manifest.n,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        # A manifest has 0 if no token bears loss, which is not a staleness.
        "staleness_max": manifest.staleness_max if manifest.num_loss_tokens else None,
        "staleness_mean": manifest.staleness_mean if manifest.num_loss_tokens else None,
        "samples": manifest.num_samples,
        "tokens": sum(one.length for one in rows),
        "generated_tokens": sum(one.num_generated for one in rows),
        "loss_tokens": manifest.num_loss_tokens,
    }


def answer_figures(manifest: Manifest) -> dict[str, float]:
    """Return metrics of the answers: lengths, truncated share, groups with equal rewards."""
    if not (rows := manifest.samples()):
        return {}
    return {
        **{f"rollout/response_len/{kind}": value for kind, value in lengths_of(rows).items()},
        "rollout/truncated_ratio": truncated_ratio(first_rows(rows)),
        **{f"rollout/zero_std/count_{reward}": float(count) for reward, count in same_rewards(rows).items()},
    }


def plain_figure(value: Any) -> float | int | str | bool | None:
    """Convert a reported value for JSON and msgpack: 0-d tensors become numbers, other objects strings."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if not isinstance(value, str):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return float(value)
    return utf8_safe(str(value)[:MAX_TEXT])


def finite_or_none(value: Any) -> Any:
    """Return ``value``, or None if it is not finite, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Row = dict[str, Any]

#: File with the rows of the run's main trainer.
STEPS_FILE = "steps.jsonl"
#: Most rows kept in memory while they cannot be written.
MAX_UNWRITTEN = 10_000
#: Row fields copied to the trainer's Redis record, in addition to reported metrics.
SHOWN = ("step", "version", "reward_mean", "staleness_max", "staleness_mean", "total_steps")


def steps_file(config: Config, name: str, *, is_main: bool) -> Path:
    """Return the file for the rows of a subscription; only the main trainer writes ``STEPS_FILE``."""
    return config.run_dir / (STEPS_FILE if is_main else f"steps-{name}.jsonl")


class StepRecorder:
    """Record the batches of one rank.

    Args:
        config: configuration of the run; None disables recording.
        name: name of the subscription.
        tally: totals of this rank, to which commits are added.
        file: file to which rows are appended; None disables recording on this rank.
        latest: writer of the trainer's Redis record; None without Redis.
        tracks: whether rows are reported to the trackers of ``trainer.report_to``.
    """

    def __init__(
        self,
        config: Config | None,
        name: str,
        tally: Tally,
        *,
        file: Path | None,
        latest: LatestRecord | None = None,
        tracks: bool = True,
    ) -> None:
        #: Total number of training steps; 0 if unknown.
        self.total_steps = 0
        #: True if the run was interrupted, so that it has no summary yet.
        self.interrupted = False
        self._config = config
        self._name = name
        self._tally = tally
        self._file = file
        self._latest = latest
        self._is_tracked = tracks and file is not None and config is not None and bool(config.trainer.report_to)
        self._trackers: Trackers | None = None
        self._lock = threading.Lock()
        #: Row of the last committed batch while it may change.
        self._row: Row | None = None
        self._is_written = True
        #: True until the next batch is delivered: reported metrics belong to this row.
        self._takes_reports = False
        #: Names of standard fields of the row, which reports do not replace.
        self._own: frozenset[str] = frozenset()
        #: Metrics reported before the commit of their batch.
        self._reported: Row = {}
        self._unwritten: list[str] = []
        self._warned = False
        #: Number of the last committed batch.
        self._last = 0
        #: Batch -> busy time at its delivery, and seconds of waiting for it.
        self._delivered: dict[int, tuple[float, float]] = {}
        self._waited_s = self._published_s = self._committed_at = 0.0

    def _busy_s(self) -> float:
        """Return the seconds of a clock that stops during waits for batches and during publications."""
        return time.monotonic() - self._tally.waits["batch"] - self._published_s

    def hand_out(self, n: int) -> None:
        """Record the delivery of batch ``n``; finish the previous row if its weights are published."""
        self._takes_reports = False
        if self._row is not None and self._row["publish_s"]:
            self.finish()
        waited_s = self._tally.waits["batch"]
        self._delivered[n] = self._busy_s(), waited_s - self._waited_s
        self._waited_s = waited_s

    def commit(self, manifest: Manifest) -> None:
        """Start the row of a committed batch, unless the batch already has a row."""
        n = manifest.n
        if self._file is None or n <= self._last:
            return
        self.finish()
        if self._is_tracked:
            self._open_trackers()
        self._tally.commit(manifest)
        busy_s = self._busy_s()
        handed_at, wait_s = self._delivered.get(n, (busy_s, 0.0))
        own: Row = {
            "step": n,
            "trainer": self._name,
            "total_steps": self.total_steps,
            **batch_figures(manifest),
            "wait_s": wait_s,
            "step_s": busy_s - max(handed_at, self._committed_at),
            "publish_s": 0.0,
            "time_s": time.time(),
            **answer_figures(manifest),
            **self._tally.drops,
        }
        self._own = frozenset(own)
        self._tally.report(dict.fromkeys(own))
        self._row = self._reported | own
        self._reported, self._is_written, self._takes_reports = {}, False, True
        self._last, self._committed_at = n, busy_s
        self._delivered = {later: at for later, at in self._delivered.items() if later > n}
        self._show()

    def report(self, figures: Mapping[str, Any]) -> None:
        """Add metrics to the row of the current step, or of the last step between two batches.

        Standard fields (``step``, ``reward_mean``, ...) cannot be overwritten.
        """
        if self._file is None:
            return
        plain = {name: plain_figure(value) for name, value in figures.items() if name not in self._own}
        self._tally.report(plain)
        if self._row is None or not self._takes_reports:
            self._reported |= plain
            if not self._last and self._latest is not None:
                self._latest.show({**plain, **self._about(time.time())})
            return
        self._row |= plain
        self._is_written = False
        self._show()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Count the time inside the ``with`` as publication time of the last committed batch."""
        began = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began
            self._published_s += took_s
            if self._row is not None:
                self._row["publish_s"] += took_s
                self._row["time_s"] = time.time()
                self._is_written = False
                self._show()
                if not self._takes_reports:
                    self.finish()

    def write(self) -> None:
        """Write the row if it changed; buffer rows while the disk is full."""
        if self._file is None:
            return
        if self._row is not None and not self._is_written:
            self._unwritten.append(json.dumps({name: finite_or_none(one) for name, one in self._row.items()}) + "\n")
            self._unwritten = self._unwritten[-MAX_UNWRITTEN:]
            self._is_written = True
        if not self._unwritten:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            append(self._file, "".join(self._unwritten))
        except (DiskFull, OSError) as exc:
            self._warn(f"failed to write steps to {self._file} ({exc}): buffering them while training continues")
            return
        self._unwritten.clear()
        self._warned = False

    def finish(self, is_reported: Callable[[Row], bool] = lambda row: False) -> None:
        """Finish the current row, if any: write it and report it to the trackers.

        Args:
            is_reported: called with the row; true skips the trackers. Its exceptions are raised here.
        """
        row = self._row
        if row is None:
            return
        self.write()
        self._row = None
        if not is_reported(row) and self._is_tracked:
            self._open_trackers().row(row)

    def rewind(self, n: int) -> None:
        """Finish the current row, as the trainer rewinds to batch ``n`` and gets later batches again."""
        self.finish()
        self._last = n
        self._delivered.clear()
        self._reported.clear()

    def evaluated(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Report rows of ``eval.jsonl`` to metrics and trackers. Thread-safe; returns at once."""
        rows = list(rows)
        self._tally.evaluate(rows)
        if self._is_tracked:
            self._open_trackers().evaluation_rows(rows)

    def _open_trackers(self) -> "Trackers":
        """Return the trackers of ``trainer.report_to``, opened on first use. Thread-safe.

        If the training loop has opened ``Trackers`` for the run itself, it reports the rows, and none are opened here.
        """
        from penstock.consumers.grpo.trackers.trackers import Trackers, is_open

        assert self._config is not None
        with self._lock:
            if self._trackers is None:
                self._trackers = Trackers(self._config, () if is_open(self._config) else None)
            return self._trackers

    def close(self, *, finished: bool = True) -> None:
        """Finish the last row and report the summary of the run. Blocks for the trackers, see ``Trackers.close``.

        Args:
            finished: False if the trainer failed or was interrupted.
        """
        self.finish()
        self.write()
        if self._unwritten:
            log.warning("lost %d rows of steps: failed to write %s", len(self._unwritten), self._file)
        if self._latest is not None:
            self._latest.close()
        if self._is_tracked:
            self._close_trackers(finished and not self.interrupted)

    def _close_trackers(self, finished: bool) -> None:
        from penstock.consumers.grpo.rows import of_steps, read_rows
        from penstock.consumers.grpo.trackers.trackers import CLOSE_S, HURRY_S

        assert self._config is not None
        trackers = self._open_trackers()
        if finished:
            trackers.summary(of_steps(self._config, read_rows(self._config.run_dir)))
        trackers.close(CLOSE_S if finished else HURRY_S)

    def _show(self) -> None:
        """Publish the row for `penstock status` and the live view. Returns at once."""
        row = self._row
        if row is None or self._latest is None:
            return
        spent_s = row["wait_s"] + row["step_s"] + row["publish_s"]
        reported = {name: value for name, value in row.items() if name not in self._own}
        shown = {name: row[name] for name in SHOWN if row.get(name) is not None}
        share = {"wait_share": row["wait_s"] / spent_s} if spent_s > 0 else {}
        self._latest.show({**reported, **shown, **self._about(row["time_s"]), **share})

    def _about(self, at_s: float) -> Row:
        return {"name": self._name, "rank": 0, "pid": os.getpid(), "at": at_s}

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)
