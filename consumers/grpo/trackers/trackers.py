"""Report a run to every tracker of ``trainer.report_to``.

    with Trainer(run="digits") as trainer:           # shows its rows, and what it reports
        for batch in trainer:
            trainer.report(loss=train(batch))
            trainer.commit(batch); trainer.publish(model)

    with Trackers(trainer.config) as trackers:       # instead of it, under names of one's own
        trackers.metrics(step, {"train/loss": loss}, batch=batch)

Each tracker has a thread of its own (trackers.py).
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from penstock.config import Config
from penstock.config.reading.secrets import masked
from penstock.config.trainer import TRACKERS
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.trackers import tracker as names
from penstock.consumers.grpo.trackers.tracker import Position, TrackedRun, Tracker
from penstock.consumers.metrics.steps import answer_figures, batch_figures
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Most queued entries; further ones are dropped.
MAX_WAITING = 1000
#: Seconds between two attempts to open a tracker.
REOPEN_S = 60.0
#: Consecutive failures after which a tracker is reopened: a writer whose disk was full never recovers.
FAILURES = 3

log = logging.getLogger(__name__)


class Reporter:
    """Reports to one tracker; every method but ``close`` returns at once.

    Args:
        name: display name of the tracker.
        position: last step and version reported there before.
        make: opens the tracker. Called in the thread, and again after a while if it raises, or if the tracker fails
            repeatedly.
    """

    def __init__(self, name: str, position: Position, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.position = position
        #: Number of repeated steps and versions that were reported before.
        self.repeated = 0
        self._make = make
        self._tracker: Tracker | None = None
        self._retry_at = 0.0
        self._failed_in_a_row = 0
        self._warned = False
        #: Entries dropped because the queue was full, and entries that failed: each is counted by one thread.
        self._no_place = self._failed = 0
        #: Entries queued, and entries finished: equal when idle.
        self._given = self._done = 0
        self._closed = False
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"report to {name}", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Return the number of entries not reported; after ``close`` including those still queued."""
        return self._no_place + self._failed + (self._given - self._done if self._closed else 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report figures of a step."""
        self._tell(partial(self._metrics, step, values))

    def evaluation(self, version: int, values: Mapping[str, float], place: float | None = None) -> None:
        """Report figures of an evaluation of ``version``; ``place``: its position among versions, None: ``version``."""
        self._tell(partial(self._evaluation, version, values, version if place is None else place))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run."""
        self._tell(lambda tracker: tracker.summary(values))

    def close(self, until: float) -> None:
        """Block until all entries are reported, at most until ``until`` (``time.monotonic``); log dropped ones."""
        try:
            self._waiting.put(None, timeout=max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, until - time.monotonic()))
        self._closed = True
        if self._thread.is_alive():
            log.warning("%s did not take everything in time: %d entries wait", self.name, self._given - self._done)
        if self.left_out:
            log.warning("%d entries were left out at %s", self.left_out, self.name)

    def _tell(self, entry: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(entry)
            self._given += 1
        except queue.Full:
            self._no_place += 1
            self._warn(f"{MAX_WAITING} entries wait for it")

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._try(entry)
            self._done += 1
        if self._tracker is not None:
            self._try(lambda tracker: tracker.close())

    def _try(self, entry: Callable[[Tracker], None]) -> None:
        try:
            if (tracker := self._open()) is not None:
                entry(tracker)
                self._failed_in_a_row = 0
            else:
                self._failed += 1
        # A library may raise SystemExit or a cancellation: this thread must continue.
        except BaseException as exc:
            self._failed += 1
            self._failed_in_a_row += 1
            self._warn(format_exc(exc))
            if self._failed_in_a_row >= FAILURES:
                self._drop()

    def _open(self) -> Tracker | None:
        if self._tracker is None and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + REOPEN_S
            self._tracker = self._make()
        return self._tracker

    def _drop(self) -> None:
        """Close the tracker; the next entry opens another."""
        tracker, self._tracker, self._failed_in_a_row = self._tracker, None, 0
        if tracker is None:
            return
        try:
            tracker.close()
        except BaseException as exc:
            log.debug("%s was not closed: %s", self.name, format_exc(exc))

    def _metrics(self, step: int, values: Mapping[str, float], tracker: Tracker) -> None:
        position = self.position
        if step <= position.step and not tracker.replaces:
            self.repeated += 1
            return
        tracker.metrics(step, values)
        position.step = step
        position.save()

    def _evaluation(self, version: int, values: Mapping[str, float], place: float, tracker: Tracker) -> None:
        position = self.position
        if version <= position.version:
            self.repeated += 1
            return
        tracker.evaluation(place, values)
        position.version = version
        position.save()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: entry not reported: %s; training continues, further dropped entries are counted", self.name, why
            )


#: Folder of a run -> its trackers that are open in this process.
_open_of: Counter[Path] = Counter()
#: Longest wait at the end for all trackers to take what they were given; where a trainer fails or was asked to stop.
CLOSE_S, HURRY_S = 30.0, 5.0


class Trackers:
    """Reports a run's figures from the trainer's process; only one of several ranks has it.

    A tracker that fails or is slow is warned of once, and neither stops nor slows the caller: entries that are not
    reported are counted. A repeated step, after a rewind or a restart from a checkpoint, is shown once: TensorBoard
    shows the later values (also of every step after it), the others the first ones.

    Args:
        report_to: names; None takes ``trainer.report_to``.

    Raises:
        ConfigError: an unknown name, or its library is not installed.
    """

    def __init__(self, config: Config, report_to: Sequence[str] | None = None) -> None:
        chosen = config.trainer.report_to if report_to is None else report_to
        check_trackers(chosen)
        self._reporters = [_reporter(name, config) for name in dict.fromkeys(chosen)]
        self._closed = False
        self._folder = config.run_dir.absolute()
        if self._reporters:
            _open_of[self._folder] += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A failed trainer is restarted, and must not wait for long.
        self.close(CLOSE_S if kind is None else HURRY_S)

    @property
    def left_out(self) -> dict[str, int]:
        """Return the number of entries that each tracker did not get."""
        return {reporter.name: reporter.left_out for reporter in self._reporters}

    def metrics(self, step: int, values: Mapping[str, Any], batch: Batch | None = None) -> None:
        """Report figures of a step under these names. Returns at once; values that are not finite numbers are skipped.

        Args:
            step: the trainer's, counted from 1, independent of versions.
            batch: the trained batch: adds its staleness, rewards, lengths, shares (``rollout/...``).
        """
        shown = names.numbers(values)
        if batch is not None:
            shown = names.of_row(batch_figures(batch.manifest)) | answer_figures(batch.manifest) | shown
        for reporter in self._reporters:
            reporter.metrics(step, shown)

    def row(self, row: Mapping[str, Any]) -> None:
        """Report a row of ``steps.jsonl``. Returns at once."""
        if self._reporters:
            self.metrics(int(row["step"]), names.of_row(row))

    def evaluation(self, version: int, values: Mapping[str, Any], place: float | None = None) -> None:
        """Report figures of an evaluation of ``version``, for example ``eval/gsm8k``, all at once. Returns at once.

        A version has one evaluation: a repeated one, or one older than the last, is skipped.

        Args:
            place: its position among versions; None: ``version``.
        """
        shown = names.numbers(values)
        for reporter in self._reporters:
            reporter.evaluation(version, shown, place)

    def evaluation_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Report rows of ``eval.jsonl``, those of one version together, at the mean version of their tokens.

        Returns at once.
        """
        if not self._reporters:
            return
        versions: dict[int, dict[str, float]] = {}
        places: dict[int, list[float]] = {}
        for row in rows:
            version = int(row["version"])
            values = versions.setdefault(version, {})
            values.update(names.of_evaluation(row))
            if (mean := row.get("mean_version")) is not None:
                places.setdefault(version, []).append(float(mean))
                values["eval/requested_version"] = float(version)
        for version in sorted(versions):
            found = places.get(version)
            self.evaluation(version, versions[version], sum(found) / len(found) if found else None)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run, numbers and texts. Returns at once."""
        shown = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        for reporter in self._reporters:
            reporter.summary(shown)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Block until every tracker has finished its queue, at most ``timeout_s`` for all of them."""
        until = time.monotonic() + timeout_s
        closed, self._closed = self._closed, True
        if self._reporters and not closed:
            _open_of[self._folder] -= 1
        for reporter in () if closed else self._reporters:
            reporter.close(until)


def is_open(config: Config) -> bool:
    """Return whether this process has open trackers of the run."""
    return _open_of[config.run_dir.absolute()] > 0


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise ConfigError for an unknown tracker, or a missing library."""
    for name in report_to:
        if name not in TRACKERS:
            raise ConfigError(f"There is no tracker {name!r}: choose {', '.join(TRACKERS)}.")
        check_installed(name, f"trainer.report_to {name}")


def _reporter(name: str, config: Config) -> Reporter:
    position = Position.at(config.run_dir / "trackers" / f"{name}.json")
    shown = masked(config.model_dump(mode="json"))
    return Reporter(name, position, partial(_open, name, TrackedRun(config.run, config.run_dir, shown, position)))


def _open(name: str, run: TrackedRun) -> Tracker:
    # Imported in the tracker's thread: some of the libraries take seconds.
    make: Callable[[TrackedRun], Tracker] = import_module(f"penstock.consumers.grpo.trackers.{name}").make
    return make(run)
