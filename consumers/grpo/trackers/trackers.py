"""Report a run to every tracker of ``trainer.report_to``.

    with Trainer(run="digits") as trainer:           # shows its rows, and what it reports
        for batch in trainer:
            trainer.report(loss=train(batch))
            trainer.commit(batch); trainer.publish(model)

    with Trackers(trainer.config) as trackers:       # instead of it, under names of one's own
        trackers.metrics(step, {"train/loss": loss}, batch=batch)

Each tracker has a thread of its own (reporter.py).
"""

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
from penstock.consumers.grpo.trackers import names
from penstock.consumers.grpo.trackers.reporter import Reporter
from penstock.consumers.grpo.trackers.tracker import Position, TrackedRun, Tracker
from penstock.consumers.metrics.step_row import answer_figures, batch_figures
from penstock.errors import ConfigError
from penstock.system.extras import check_installed

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
