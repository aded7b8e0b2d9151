"""Report a run to every tracker of ``trainer.report_to``, each from a thread of its own.

with Trainer(run="digits") as trainer:           # shows its rows, and what it reports
    for batch in trainer:
        trainer.report(loss=train(batch))
        trainer.commit(batch); trainer.publish(model)

with Trackers(trainer.config) as trackers:       # instead of it, under names of one's own
    trackers.metrics(step, {"train/loss": loss}, batch=batch)
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from penstock.config import Config
from penstock.config.trainer import TRACKERS
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.trackers import names
from penstock.consumers.grpo.trackers.kinds import KINDS, Position, Tracker
from penstock.consumers.metrics.steps import answer_figures, batch_figures
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Most queued entries; further ones are dropped.
MAX_WAITING = 1000
#: Seconds between two attempts to open a tracker.
REOPEN_S = 60.0
#: Longest wait at the end for all trackers to take what they were given; where a trainer fails or was asked to stop.
CLOSE_S, HURRY_S = 30.0, 5.0

log = logging.getLogger(__name__)

#: Folder of a run -> its trackers that are open in this process.
_open_of: Counter[Path] = Counter()


class Reporter:
    """Reports to one tracker, from a thread; its methods return at once, except ``close``.

    Args:
        name: display name of the tracker.
        position: last step and version reported there before.
        make: opens the tracker. Called in the thread, and again after a while if it, or the tracker, has failed: a
            writer whose disk was full never recovers.
    """

    def __init__(self, name: str, position: Position, make: Callable[[], Tracker]) -> None:
        self.name, self.position = name, position
        self._make = make
        self._tracker: Tracker | None = None
        self._retry_at = 0.0
        self._warned = False
        #: Entries given, and entries that the tracker got: each is counted by one thread.
        self._given = self._done = 0
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"report to {name}", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Return the number of entries that the tracker did not get, so far."""
        return self._given - self._done

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report figures of a step, unless it was reported before and the tracker cannot replace it."""

        def pass_on(tracker: Tracker) -> None:
            if step > self.position.step or tracker.replaces:
                tracker.metrics(step, values)
                self.position.step = step
                self.position.save()

        self._put(pass_on)

    def evaluation(self, version: int, values: Mapping[str, float], place: float) -> None:
        """Report figures of a version, unless it was reported before, at ``place`` of its axis."""

        def pass_on(tracker: Tracker) -> None:
            if version > self.position.version:
                tracker.evaluation(place, values)
                self.position.version = version
                self.position.save()

        self._put(pass_on)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run."""
        self._put(lambda tracker: tracker.summary(values))

    def close(self, until: float) -> None:
        """Block until all entries are reported, at most until ``until`` (``time.monotonic``); log dropped ones."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=max(0.0, until - time.monotonic()))
            self._thread.join(max(0.0, until - time.monotonic()))
        if self.left_out:
            late = ", as it did not take everything in time" if self._thread.is_alive() else ""
            log.warning("%d entries were left out at %s%s", self.left_out, self.name, late)

    def _put(self, entry: Callable[[Tracker], None]) -> None:
        self._given += 1
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._warn(f"{MAX_WAITING} entries wait for it")

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._done += self._try(entry)
        if self._tracker is not None:
            self._try(lambda tracker: tracker.close())

    def _try(self, entry: Callable[[Tracker], None]) -> bool:
        """Return whether the tracker took an entry; one that fails is closed, and opened again after a while."""
        if self._tracker is None and time.monotonic() < self._retry_at:
            return False
        # A library may raise SystemExit or a cancellation: this thread must continue.
        try:
            if self._tracker is None:
                self._retry_at = time.monotonic() + REOPEN_S
                self._tracker = self._make()
            entry(self._tracker)
            return True
        except BaseException as exc:
            self._warn(format_exc(exc))
        broken, self._tracker = self._tracker, None
        if broken is not None:
            with suppress(BaseException):
                broken.close()
        return False

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: entry not reported: %s; training continues, further dropped entries are counted", self.name, why
            )


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
        self._folder, self._closed = config.run_dir.absolute(), not self._reporters
        _open_of[self._folder] += bool(self._reporters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A failed trainer is restarted, and must not wait for long.
        self.close(CLOSE_S if kind is None else HURRY_S)

    @property
    def left_out(self) -> dict[str, int]:
        """Return the number of entries that each tracker did not get, so far."""
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
        self.metrics(int(row["step"]), names.of_row(row))

    def evaluation(self, version: int, values: Mapping[str, Any], place: float | None = None) -> None:
        """Report figures of an evaluation of ``version``, for example ``eval/gsm8k``, all at once. Returns at once.

        A version has one evaluation: a repeated one, or one older than the last, is skipped.

        Args:
            place: its position among versions; None: ``version``.
        """
        shown = names.numbers(values)
        for reporter in self._reporters:
            reporter.evaluation(version, shown, version if place is None else place)

    def evaluation_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Report rows of ``eval.jsonl``, those of one version together, at the mean version of their tokens.

        Returns at once.
        """
        versions: dict[int, tuple[dict[str, float], list[float]]] = {}
        for row in rows:
            values, places = versions.setdefault(int(row["version"]), ({}, []))
            values |= names.of_evaluation(row)
            if (mean := row.get("mean_version")) is not None:
                places.append(float(mean))
                values["eval/requested_version"] = float(row["version"])
        for version, (values, places) in sorted(versions.items()):
            self.evaluation(version, values, sum(places) / len(places) if places else None)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run, numbers and texts. Returns at once."""
        shown = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        for reporter in self._reporters:
            reporter.summary(shown)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Block until every tracker has finished its queue, at most ``timeout_s`` for all of them."""
        if self._closed:
            return
        self._closed = True
        _open_of[self._folder] -= 1
        until = time.monotonic() + timeout_s
        for reporter in self._reporters:
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
    return Reporter(name, position, lambda: KINDS[name](config, position))
