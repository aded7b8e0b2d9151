"""Finished evaluations, for a training loop (T18).

for evaluation in trainer.evaluations:          # finished since the last time; does not block
    print(evaluation.version, evaluation.accuracy)
last = trainer.evaluations.evaluate()           # the newest version; blocks
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError, ProtocolError, WaitTimeout
from penstock.history.eval_rows import FILE
from penstock.records.causes import EvaluationPending

log = logging.getLogger(__name__)

#: Least share of the tokens that the requested version generated, for an evaluation to end training.
LEAST_SHARE = 0.95
#: Least share of an evaluation's prompts that were answered, for it to end training.
LEAST_ANSWERED = 0.95
#: Finished evaluations that are kept for a loop that does not read them; ``eval.jsonl`` has all of them.
MAX_UNREAD = 1024
#: Seconds between two checks for a stop.
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One finished evaluation of the held-out prompts (``data.eval``)."""

    #: The version that was to be evaluated.
    version: int
    #: Dataset -> its row of ``eval.jsonl``, see ``penstock.history.eval_rows.summarize``.
    datasets: Mapping[str, Mapping[str, Any]]

    @property
    def accuracy(self) -> dict[str, float]:
        """Return the mean reward of each dataset."""
        return {dataset: float(row["accuracy"]) for dataset, row in self.datasets.items()}


class Versions(Protocol):
    """The clock of a model."""

    def read(self) -> int:
        """Return the newest version; 0 before the first."""

    def ask_evaluation(self, version: int, end: str) -> None:
        """Have a version evaluated, whatever ``data.eval_every`` says."""


class Evaluations:
    """The evaluations of a run: a thread adds rows, the training loop reads and waits. Thread-safe.

    Iterating yields those that finished since the last time, oldest first, and does not block; it raises PenstockError
    after reading them failed. The newest 1,024 are kept for it; ``eval.jsonl`` has all of them.

    Args:
        config: of the run; None: a recording, which has no evaluations.
        versions: the clock of the model that is evaluated.
        is_read: whether this process reads evaluations, where the run has any; otherwise it sees none.
    """

    def __init__(
        self, config: Config | None = None, versions: Versions | None = None, *, is_read: bool = False
    ) -> None:
        self._names = {one.name for one in config.data.eval} if config is not None else set()
        self._path = config.run_dir / FILE if config is not None else Path(FILE)
        self._versions = versions if is_read and self._names else None
        self._changed = threading.Condition()
        #: Version -> dataset -> row.
        self._rows: dict[int, dict[str, Mapping[str, Any]]] = {}
        self._unread: deque[int] = deque(maxlen=MAX_UNREAD)
        #: Versions for which the log has a reason why they did not end training.
        self._warned: set[int] = set()
        #: Newest version whose evaluation ended: what has no row by then does not come.
        self.ended = 0
        self._error: BaseException | None = None
        #: Called with new rows, also with those of earlier starts, in the thread that adds them.
        self.listeners: list[Callable[[list[dict[str, Any]]], None]] = []

    @property
    def is_read(self) -> bool:
        """Return whether this process reads evaluations."""
        return self._versions is not None

    def add(self, rows: Iterable[dict[str, Any]], *, is_new: bool = True) -> None:
        """Add rows of ``eval.jsonl``, of this start or (``is_new`` false) of an earlier one."""
        rows = list(rows)
        with self._changed:
            for row in rows:
                version = int(row["version"])
                self._rows.setdefault(version, {})[str(row["dataset"])] = row
                if is_new and version not in self._unread:
                    self._unread.append(version)
            for listener in self.listeners:
                listener(rows)
            self._changed.notify_all()

    def has(self, version: int, dataset: str) -> bool:
        """Return whether there is a row."""
        return dataset in self._rows.get(version, {})

    def fail(self, exc: BaseException) -> None:
        """Report that evaluations are no longer read: iterating and ``wait`` raise from now on."""
        with self._changed:
            self._error = exc
            self._changed.notify_all()

    def end(self, version: int, earlier: Iterable[int] = ()) -> None:
        """Report that evaluations up to ``version`` ended, of which ``earlier`` were not reported yet."""
        with self._changed:
            self.ended = version
            for one in (*earlier, version):
                if not self._is_complete(one):
                    log.warning("%s", self._unanswered(one))
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Evaluation]:
        with self._changed:
            self._check()
            versions = list(self._unread)
            self._unread.clear()
            found = [Evaluation(version, dict(self._rows[version])) for version in versions]
        return iter(found)

    def evaluate(
        self,
        version: int | None = None,
        *,
        end: str = "",
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Evaluation | None:
        """Have ``version`` (None: the newest) evaluated, whatever ``data.eval_every`` says, and return the result.

        Blocks until it is finished, or until ``stopped()``: None.

        Args:
            end: as of ``Trainer.ask_evaluation``.
            timeout_s: longest wait; None: no limit.

        Raises:
            ConfigError: the run has no ``data.eval``, or this process does not read evaluations.
            ProtocolError: nothing is published yet.
            WaitTimeout, PenstockError: as ``wait``.
        """
        if not self._names:
            raise ConfigError("data.eval names no dataset, so there is nothing to evaluate: add one.")
        if self._versions is None:
            raise ConfigError("Rank 0 of the trainer that publishes reads evaluations: call evaluate() there.")
        wanted = self._versions.read() if version is None else version
        if not wanted:
            raise ProtocolError("Nothing can be evaluated yet: publish the first weights before.")
        self._versions.ask_evaluation(wanted, end)
        return self.wait(wanted, timeout_s, stopped)

    def wait(
        self, version: int, timeout_s: float | None, stopped: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Return the evaluation of ``version``; blocks until all datasets have a row, or until ``stopped()``: None.

        Args:
            timeout_s: longest wait; None: no limit.

        Raises:
            WaitTimeout: they were not there in time.
            PenstockError: reading them failed, or no prompt of a dataset was answered.
        """
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._is_complete(version):
                self._check()
                if stopped():
                    return None
                if self.ended >= version:
                    raise PenstockError(self._unanswered(version))
                if time.monotonic() >= until:
                    missing = sorted(self._names - self._rows.get(version, {}).keys())
                    count = len(self._names) - len(missing)
                    raise WaitTimeout(
                        f"The evaluation of version {version} did not finish within {timeout_s:g} s "
                        f"({count} of {len(self._names)} datasets did, not {', '.join(missing)}): "
                        "`penstock why` says what it waits for; a trainer that is started again waits for it again.",
                        count=count,
                        cause=EvaluationPending(version, tuple(missing)),
                    )
                self._changed.wait(min(POLL_S, until - time.monotonic()))
            return Evaluation(version, dict(self._rows[version]))

    def has_reached(self, wanted: float) -> bool:
        """Return whether the mean accuracy over the datasets of one version is ``wanted`` or above.

        It counts if every dataset has a result, the version generated at least ``LEAST_SHARE`` of each dataset's tokens
        and at least ``LEAST_ANSWERED`` of the evaluation's prompts were answered. If it fails only the last two, the
        log has the reason once.
        """
        with self._changed:
            means = {
                version: _mean_accuracy(rows) for version, rows in self._rows.items() if self._is_complete(version)
            }
            high = [version for version, mean in means.items() if mean >= wanted]
            doubts = {version: _doubt(self._rows[version].values()) for version in high}
            for version in doubts.keys() - self._warned:
                if doubts[version]:
                    self._warned.add(version)
                    log.warning(
                        "version %d is at %.3f, and does not end training: %s", version, means[version], doubts[version]
                    )
        return not all(doubts.values())

    def _check(self) -> None:
        if self._error is not None:
            raise PenstockError(f"The evaluation ended: {self._error}") from self._error

    def _is_complete(self, version: int) -> bool:
        """Return whether every dataset has its row: a kill may have come between two of them."""
        return self._names <= self._rows.get(version, {}).keys()

    def _unanswered(self, version: int) -> str:
        missing = sorted(self._names - self._rows.get(version, {}).keys())
        return (
            f"Version {version} has no accuracy on {', '.join(missing)}, and none is to come: no prompt of it was "
            f"answered (`penstock dead` says why), or its row in {self._path} is gone."
        )


def _mean_accuracy(rows: Mapping[str, Mapping[str, Any]]) -> float:
    return sum(float(row["accuracy"]) for row in rows.values()) / len(rows)


def _doubt(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return why an evaluation does not count for ``trainer.stop_at_accuracy``; '' if it does."""
    rows = list(rows)
    # A row without these fields proves nothing.
    share = min(float(row.get("asked_share") or 0.0) for row in rows)
    asked = max(1, *(int(row.get("asked", 0)) for row in rows))
    answered = sum(int(row.get("prompts", 0)) for row in rows) / asked
    if share < LEAST_SHARE:
        return (
            f"it drew {100 * share:.0f} % of the evaluated tokens, and trainer.stop_at_accuracy needs "
            f"{100 * LEAST_SHARE:.0f} %; set data.eval_pinned to have a version evaluated alone"
        )
    if answered < LEAST_ANSWERED:
        return (
            f"{100 * answered:.0f} % of its prompts were answered, and trainer.stop_at_accuracy needs "
            f"{100 * LEAST_ANSWERED:.0f} %; `penstock dead` lists those that were given up"
        )
    return ""
