"""Held-out accuracy, beside training: a subscription of its own on lane ``eval``, read from metadata alone (T18).

One batch is one evaluation: the cohort that the producer admitted for one version.
"""

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from consumers.subscriber import Subscriber
from penstock.config import Config
from penstock.control import PASSING
from penstock.errors import ConfigError, PenstockError, WaitTimeout
from penstock.keys import Keys
from penstock.messages import Manifest, Row
from penstock.scripts import Value

log = logging.getLogger(__name__)

NAME = "eval"
#: How late a stop is seen.
LOOK_S = 0.5


class Evaluation:
    """Reads evaluations in a thread and appends a row per dataset to ``eval.jsonl``.

    Args:
        path: file of the rows ``{"dataset", "version", "accuracy", "num", "truncated_ratio", "time_s"}``.
    """

    def __init__(self, config: Config, path: Path) -> None:
        if config.redis.url is None:
            raise ConfigError("The evaluation needs redis.url: the address of the run's Redis.")
        self._subscriber = Subscriber(config.redis.url, Keys(config.run), NAME)
        self._path = path
        self._stop = threading.Event()
        self._news = threading.Condition()
        #: Version -> dataset -> accuracy.
        self.accuracy: dict[int, dict[str, float]] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)

    def start(self) -> None:
        """Begin to read. Returns at once."""
        self._remember(_read(self._path))
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the subscription back. Blocks shortly."""
        self._stop.set()
        self._thread.join()

    def wait(self, version: int, timeout_s: float) -> dict[str, float]:
        """Accuracy by dataset of ``version``; blocks until it is there. Raises WaitTimeout, PenstockError."""
        with self._news:
            there = self._news.wait_for(lambda: version in self.accuracy or self._error is not None, timeout_s)
            if self._error is not None:
                raise PenstockError(f"The evaluation ended: {self._error}") from self._error
            if not there:
                raise WaitTimeout(f"The evaluation of version {version} was not there in {timeout_s:g} s.")
            return self.accuracy[version]

    @property
    def best(self) -> float:
        """Largest mean accuracy over the datasets of one version so far; 0 without any."""
        with self._news:
            return max((sum(one.values()) / len(one) for one in self.accuracy.values() if one), default=0.0)

    def _remember(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.accuracy.setdefault(int(row["version"]), {})[str(row["dataset"])] = float(row["accuracy"])

    def _run(self) -> None:
        try:
            num_jobs = self._await_size()
            if not num_jobs:
                return
            self._subscriber.join()
            self._subscriber.define(_definition(num_jobs))
            while not self._stop.is_set():
                self._take_one()
        except (PenstockError, *PASSING) as exc:
            log.error("the evaluation ended: %s", exc)
            with self._news:
                self._error = exc
                self._news.notify_all()
        finally:
            self._subscriber.leave()

    def _await_size(self) -> int:
        """Jobs of one evaluation, as the producer counts them; 0 when stopped before it said so."""
        subscriber = self._subscriber
        while not self._stop.is_set():
            size = subscriber.control.do(lambda client: client.hget(subscriber.keys.source, "eval_jobs"))
            if size is not None:
                subscriber.waiting.end()
                return int(size)
            subscriber.waiting.for_("the producer, to say how many prompts an evaluation has")
            self._stop.wait(LOOK_S)
        return 0

    def _take_one(self) -> None:
        n = self._subscriber.cursor + 1
        self._subscriber.ask(n)
        try:
            delivery = self._subscriber.read(n, stopped=self._stop.is_set)
        except WaitTimeout:
            return
        # One that was written down before a kill comes again.
        rows = [
            row for row in summarize(delivery.manifest) if row["dataset"] not in self.accuracy.get(row["version"], {})
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._subscriber.commit(n, delivery.digest)
        self._subscriber.checkpointed(n)
        with self._news:
            self._remember(rows)
            self._news.notify_all()


def _definition(num_jobs: int) -> dict[str, Value]:
    return {
        "lanes": "eval",
        "mode": "eval",
        "sampler": "cohort",
        "size": num_jobs,
        "per_version": 1,
        "reuse": 1,
        "driving": 0,
    }


def summarize(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """One row per (dataset, version) of an evaluation's manifest; accuracy is the mean reward over its samples."""
    by_set: dict[tuple[str, int], list[Row]] = {}
    for row in manifest.samples():
        dataset, epoch, _ = row.job.rsplit("/", 2)
        by_set.setdefault((dataset, int(epoch)), []).append(row)
    for (dataset, version), rows in sorted(by_set.items()):
        yield {
            "dataset": dataset,
            "version": version,
            "accuracy": sum(row.reward for row in rows) / len(rows),
            "num": len(rows),
            "truncated_ratio": sum(row.status == "truncated" for row in rows) / len(rows),
            "time_s": time.time(),
        }


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of an earlier start; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            log.warning("%s ends in half a line; it is left out", path)
    return rows
