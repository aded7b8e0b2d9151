"""Held-out accuracy, beside training: a subscription of its own on lane ``eval``, read from metadata alone (T18).

One batch is one evaluation: the cohort that the producer admitted for one version.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from consumers.grpo.scores import Answer, by_category, rates_of
from consumers.grpo.totals import mean
from consumers.subscription.subscriber import Subscriber
from penstock.config import Config
from penstock.config.staleness import Sampler
from penstock.config.subscription import ASKED, Definition
from penstock.errors import ConfigError, PenstockError, ProtocolError, WaitTimeout
from penstock.names import Lane
from penstock.protocol.keys import Keys
from penstock.protocol.position import read_count
from penstock.protocol.records.manifest import Manifest, Row
from penstock.protocol.records.sample import SampleStatus
from penstock.protocol.records.sample_meta import SampleMeta, iter_metas
from penstock.protocol.records.small_maps import count_of
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.system.disk import append, until_room

log = logging.getLogger(__name__)

NAME = "eval"
#: Least share of tokens that the asked version drew, for an evaluation to end training.
LEAST_SHARE = 0.95
#: Least share of an evaluation's prompts that were answered, for it to end training.
LEAST_ANSWERED = 0.95
#: Jobs whose records are read in one round trip.
JOBS_AT_ONCE = 64
#: Places in the order of admission that batches took, those passed over, and the last batch.
PLACES = ("cum", "skipped", "cut")
NOTHING: Mapping[tuple[str, int], Mapping[str, Any]] = {}
#: How late a stop is seen.
LOOK_S = 0.5


class Evaluation:
    """Reads evaluations in a thread and appends a row per dataset to ``eval.jsonl``.

    Args:
        path: file of the rows; see :func:`summarize`.
        tell: called with the rows of earlier starts and of each evaluation, from the thread that reads them.
    """

    def __init__(
        self, config: Config, path: Path, tell: Callable[[Iterable[dict[str, Any]]], None] = lambda rows: None
    ) -> None:
        if config.redis.url is None:
            raise ConfigError("The evaluation needs redis.url: the address of the run's Redis.")
        self._subscriber = Subscriber(config.redis.url, Keys(config.run), NAME)
        self._path = path
        self._tell = tell
        self._datasets = {one.name for one in config.data.eval}
        #: Votes need several answers to a prompt.
        self._tells_more = any((one.n or 1) > 1 or one.category_key is not None for one in config.data.eval)
        self._stop = threading.Event()
        self._news = threading.Condition()
        #: Version -> dataset -> accuracy.
        self.accuracy: dict[int, dict[str, float]] = {}
        #: Version -> dataset -> share of its tokens that this version drew.
        self._shares: dict[int, dict[str, float]] = {}
        #: Version -> dataset -> its prompts that were answered, and the prompts that the evaluation asked for in all.
        self._prompts: dict[int, dict[str, tuple[int, int]]] = {}
        self._num_jobs = 0
        #: Versions of which it was said why they did not end training.
        self._said: set[int] = set()
        #: Last version whose evaluation is over: what it has no row of comes no more.
        self._over = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)

    def start(self) -> None:
        """Begin to read. Returns at once."""
        self.remember(_read(self._path))
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the subscription back. Blocks shortly."""
        self._stop.set()
        self._thread.join()

    def wait(
        self, version: int, timeout_s: float | None, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Accuracy by dataset of ``version``; blocks until all of them are there, or until ``stopped()``: None.

        Args:
            timeout_s: longest wait; None: no limit.

        Raises:
            WaitTimeout: they were not there in time.
            PenstockError: what reads them died, or no prompt of a dataset was answered.
        """
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._news:
            while not self._is_whole(version):
                if self._error is not None:
                    raise PenstockError(f"The evaluation ended: {self._error}") from self._error
                if stopped():
                    return None
                if self._over >= version:
                    raise PenstockError(self._unanswered(version))
                if time.monotonic() >= until:
                    missing = sorted(self._datasets - self.accuracy.get(version, {}).keys())
                    cause = f"the evaluation of version {version} on {', '.join(missing)}"
                    raise WaitTimeout(
                        f"The evaluation of version {version} did not finish within data.eval_timeout_s = {timeout_s:g}"
                        f" ({len(self._datasets) - len(missing)} of {len(self._datasets)} datasets did, not "
                        f"{', '.join(missing)}): `penstock why` says what it waits for; a trainer that is started "
                        "again waits for it again.",
                        count=len(self._datasets) - len(missing),
                        cause=cause,
                    )
                self._news.wait(min(LOOK_S, until - time.monotonic()))
            return self.accuracy[version]

    def _is_whole(self, version: int) -> bool:
        """Whether every dataset has its row: a kill may have come between two of them."""
        return self._datasets <= self.accuracy.get(version, {}).keys()

    def _unanswered(self, version: int) -> str:
        missing = sorted(self._datasets - self.accuracy.get(version, {}).keys())
        return (
            f"Version {version} has no accuracy on {', '.join(missing)}, and none is to come: no prompt of it was "
            f"answered (`penstock dead` says why), or its row in {self._path} is gone."
        )

    def has_reached(self, wanted: float) -> bool:
        """Whether the mean accuracy over the datasets of one version is ``wanted`` or above, and is of that version.

        It is where at least ``LEAST_SHARE`` of each dataset's tokens were drawn by the version and at least
        ``LEAST_ANSWERED`` of the evaluation's prompts were answered; else the log says once why it does not count.
        """
        with self._news:
            high = [v for v, one in self.accuracy.items() if one and sum(one.values()) / len(one) >= wanted]
            doubts = {version: self._doubt(version) for version in high}
            for version in doubts.keys() - self._said:
                if doubts[version]:
                    self._said.add(version)
                    mean = sum(self.accuracy[version].values()) / len(self.accuracy[version])
                    log.warning("version %d is at %.3f, and does not end training: %s", version, mean, doubts[version])
        return not all(doubts.values())

    def _doubt(self, version: int) -> str:
        """Why an evaluation does not count for ``trainer.stop_at_accuracy``; "" where it does."""
        share = min(self._shares[version].values())
        prompts = self._prompts[version].values()
        answered = sum(one for one, _ in prompts) / max(1, *(asked for _, asked in prompts))
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

    def remember(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take in rows of :func:`summarize`, of this start or an earlier one."""
        rows = list(rows)
        for row in rows:
            version, dataset = int(row["version"]), str(row["dataset"])
            self.accuracy.setdefault(version, {})[dataset] = float(row["accuracy"])
            # A row without it proves nothing.
            self._shares.setdefault(version, {})[dataset] = float(row.get("asked_share") or 0.0)
            prompts = int(row.get("prompts", 0)), int(row.get("asked", 0))
            self._prompts.setdefault(version, {})[dataset] = prompts
        self._tell(rows)

    def _run(self) -> None:
        try:
            self._num_jobs = self._await_size()
            if not self._num_jobs:
                return
            self._subscriber.join()
            self._subscriber.define(definition(self._num_jobs))
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
            delivery = self._subscriber.read(n, stopped=self._stop.is_set, look=self._look)
        except WaitTimeout:
            return
        # One that was written down before a kill comes again.
        found = summarize(delivery.manifest, self._num_jobs, self._said_of(delivery.manifest))
        rows = [row for row in found if row["dataset"] not in self.accuracy.get(row["version"], {})]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        until_room(partial(append, self._path, text), tell=self._subscriber.waiting.for_, stopped=self._stop.is_set)
        self._subscriber.commit(n, delivery.digest)
        self._subscriber.checkpointed(n)
        with self._news:
            self.remember(rows)
            self._news.notify_all()

    def _look(self) -> None:
        """See whether the newest evaluation is over: a cohort of which nothing is left is passed over without a batch.

        Blocks for a round trip.
        """
        keys = self._subscriber.keys

        def ask(client: Client) -> Any:
            with client.pipeline(transaction=False) as pipe:
                # In the order in which they grow.
                pipe.hmget(keys.source, "evaluated", "evaluating")
                pipe.hget(keys.counters, f"seq:{Lane.EVAL}")
                pipe.zcard(keys.unfinished(Lane.EVAL))
                pipe.hmget(keys.sub(NAME), PLACES)
                return pipe.execute()

        versions, admitted, unfinished, raw = self._subscriber.control.do(ask)
        passed, skipped, cut = (read_count(value, name, NAME) for value, name in zip(raw, PLACES, strict=True))
        version = count_of(versions[0], "The version that was evaluated last")
        begun = count_of(versions[1], "The version that is being evaluated")
        left = count_of(admitted, "The number of jobs that were ever evaluated") - passed - skipped
        # Prompts that were requeued, and are answered or dead again, make no evaluation by themselves.
        is_rest = begun <= version and not unfinished and left < self._num_jobs
        if version > self._over and cut == self._subscriber.cursor and (left <= 0 or is_rest):
            names = self._subscriber.control.do(lambda client: client.hkeys(keys.source))
            found = (name.removeprefix(b"eval@") for name in names if name.startswith(b"eval@"))
            evaluated = [count_of(one, "A version that was evaluated") for one in found]
            self.end(version, sorted(one for one in evaluated if self._over < one < version))

    def end(self, version: int, earlier: Iterable[int] = ()) -> None:
        """Of evaluations up to ``version`` nothing more comes; ``earlier`` are those that were not told of yet."""
        with self._news:
            self._over = version
            for one in (*earlier, version):
                if not self._is_whole(one):
                    log.warning("%s", self._unanswered(one))
            self._news.notify_all()

    def _said_of(self, manifest: Manifest) -> dict[tuple[str, int], Mapping[str, Any]]:
        """What rewards said of the samples beside their numbers, where anything is told by it. Blocks."""
        if not self._tells_more:
            return {}
        jobs = list(dict.fromkeys(row.job for row in manifest.rows))
        found: dict[tuple[str, int], Mapping[str, Any]] = {}
        for at in range(0, len(jobs), JOBS_AT_ONCE):
            some = jobs[at : at + JOBS_AT_ONCE]
            for job, data in zip(some, self._records(some), strict=True):
                found |= {(job, meta.k): meta.reward_info for meta in _metas(job, data)}
        return found

    def _records(self, jobs: Sequence[str]) -> list[bytes | None]:
        names = [self._subscriber.keys.meta(job) for job in jobs]
        return self._subscriber.control.do(lambda client: client.mget(names))


def definition(num_jobs: int) -> Definition:
    """The subscription that reads evaluations of ``num_jobs`` jobs each."""
    return Definition(lanes=(Lane.EVAL,), mode=ASKED, sampler=Sampler.COHORT, size=num_jobs)


def summarize(
    manifest: Manifest, asked: int, said: Mapping[tuple[str, int], Mapping[str, Any]] = NOTHING
) -> Iterator[dict[str, Any]]:
    """One row per (dataset, version) of an evaluation's manifest.

    ``version`` is the one that was asked for, ``oldest`` and ``newest`` are those that drew, and ``asked_share`` is the
    share of the tokens proven to be of the asked one, of all whose version is known (a filter may have masked others);
    weights that change in place, or between two prompts, make them differ. ``accuracy`` is the mean reward over the
    ``num`` samples of ``prompts`` prompts of this dataset; ``asked`` are the prompts that the whole evaluation has.
    ``pass@K`` and ``maj@K`` are as ``pass_rates`` and ``majority_rates``; ``categories`` has the scores of each one.

    Args:
        said: what the reward said of a sample beside its number, by job and k.
    """
    by_set: dict[tuple[str, int], list[Row]] = {}
    for row in manifest.samples():
        dataset, epoch, _ = row.job.rsplit("/", 2)
        by_set.setdefault((dataset, int(epoch)), []).append(row)
    for (dataset, version), rows in sorted(by_set.items()):
        answers = [_answer(row, said.get((row.job, row.k), {})) for row in rows]
        categories = by_category(answers)
        yield {
            "dataset": dataset,
            "version": version,
            "accuracy": sum(row.reward for row in rows) / len(rows),
            "num": len(rows),
            "prompts": len({row.job for row in rows}),
            "asked": asked,
            "oldest": min(row.oldest for row in rows),
            "newest": max(row.newest for row in rows),
            "asked_share": mean(sum(_drawn_by(version, row) for row in rows), sum(row.num_loss for row in rows)),
            "truncated_ratio": sum(row.status == SampleStatus.TRUNCATED for row in rows) / len(rows),
            **rates_of(answers),
            **({"categories": categories} if categories else {}),
            "time_s": time.time(),
        }


def _answer(row: Row, said: Mapping[str, Any]) -> Answer:
    return Answer(row.job, row.k, row.reward, *(str(said.get(name) or "") for name in ("pred", "category")))


def _drawn_by(version: int, row: Row) -> int:
    """Tokens of a sample that ``version`` is proven to have drawn.

    None are out of date in an evaluation, so all are listed; one whose version is not proven counts as of the oldest
    that may have drawn it (T6), and counts for none.
    """
    told = row.loss_versions or [[row.oldest_loss, row.num_loss]]
    drawn = sum(tokens for drawn_by, tokens in told if drawn_by == version)
    return max(0, drawn - row.num_unproven)


def _metas(job: str, data: bytes | None) -> Sequence[SampleMeta]:
    """Records of a group; none where they cannot be read: its rewards are in the manifest all the same."""
    try:
        return list(iter_metas(data or b"", f"metadata of group {job}"))
    except ProtocolError as exc:
        log.warning("%s: what was said of its samples is left out", exc)
        return []


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of an earlier start; a line that a kill cut short, or that is no row, is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            log.warning("%s has a line that is cut short; it is left out", path)
    return rows
