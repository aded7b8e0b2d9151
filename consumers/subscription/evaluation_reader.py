"""Read finished evaluations during training with a subscription to lane ``eval``, without payloads (T18).

    producer ─> jobs of lane eval ─> workers ─> cohort ─> batch of subscription eval ─> eval.jsonl, Evaluations ─> loop

A batch is one evaluation: the cohort that the producer admitted for a version. A batch is committed, and its groups are
released, once its rows are in ``eval.jsonl``.

One of several publishing trainers reads. The others stand by: they read results from the file, and take over the
subscription if its owner is gone. No process depends on a standby reader, so it reports no wait.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.config import Config
from penstock.config.staleness import Sampler
from penstock.config.subscription import ASKED, Definition
from penstock.consumers.subscription.evaluation import POLL_S, Evaluations
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import DiskFull, OwnershipLost, PenstockError, WaitTimeout
from penstock.history.eval_rows import FILE, add_rows, read_rows, reward_info_of, summarize
from penstock.names import Lane
from penstock.protocol.position import read_count
from penstock.records.causes import EvaluationSizeUnknown
from penstock.records.codec import count_of
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.system.disk import until_room

log = logging.getLogger(__name__)

NAME = "eval"
#: Job records read per round trip.
JOBS_AT_ONCE = 64
#: Fields of the subscription: positions used by batches, positions skipped, last batch.
PLACES = ("cum", "skipped", "cut")


class EvaluationReader:
    """Read evaluations in a thread, append a row per dataset to ``eval.jsonl``, and add it to ``results``.

    The thread has its own connection to the control Redis. It is not started without held-out prompts, or if
    ``results`` is not read.
    """

    def __init__(self, config: Config, results: Evaluations) -> None:
        self._config = config
        self._path = config.run_dir / FILE
        self.results = results
        #: Votes need several answers to a prompt.
        self._needs_reward_info = any((one.n or 1) > 1 or one.category_key is not None for one in config.data.eval)
        self._stop = threading.Event()
        self._num_jobs = 0
        #: Size of the file when its rows were last added; None before.
        self._size: int | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read the rows of earlier starts, then start the thread. Blocks for the disk."""
        if self.results.is_read:
            with suppress(OSError):  # the thread retries and reports it
                self._add_written()
            self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and release the subscription. Blocks briefly. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read_while_owner()
        except Exception as exc:
            if self._stop.is_set() and isinstance(exc, (DiskFull, OSError)):
                log.warning("failed to write evaluations, leaving them to the next trainer: %s", exc)
                return
            is_known = isinstance(exc, (PenstockError, *PASSING))
            log.error("stopped reading evaluations: %s", exc, exc_info=not is_known)
            self.results.fail(exc)

    def _read_while_owner(self) -> None:
        """Acquire the subscription once it is free, and read evaluations until a stop or a loss of ownership."""
        url = self._config.redis.url
        assert url is not None
        self._subscriber = Subscriber(url, Keys(self._config.run), NAME)
        try:
            self._num_jobs = self._await_size()
            while not self._stop.is_set() and not self._subscriber.join_if_free():
                with suppress(OSError):
                    self._add_written()
                self._stop.wait(POLL_S)
            if self._stop.is_set():
                return
            self._subscriber.define(definition(self._num_jobs))
            # The buffer or an earlier owner may have written rows until now.
            self._until_done(self._add_written)
            while not self._stop.is_set():
                self._take_one()
        except OwnershipLost as exc:
            log.warning("lost the evaluation subscription, another trainer may read it now: %s", exc)
        finally:
            self._subscriber.leave()

    def _add_written(self) -> None:
        """Add new rows of the file to ``results`` if the file changed. Blocks. Raises OSError."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            rows = [row for row in read_rows(self._path) if not self.results.has(row["version"], row["dataset"])]
            self.results.add(rows, is_new=self._size is not None)
            self._size = size

    def _until_done(self, work: Callable[[], None]) -> None:
        until_room(work, blocked_on=self._subscriber.waiting.blocked_on, stopped=self._stop.is_set, path=self._path)

    def _await_size(self) -> int:
        """Wait for the producer's count of jobs per evaluation and return it; return 0 if stopped."""
        subscriber = self._subscriber
        while not self._stop.is_set():
            size = subscriber.control.do(lambda client: client.hget(subscriber.keys.source, "eval_jobs"))
            if size is not None:
                subscriber.waiting.end()
                return int(size)
            subscriber.waiting.blocked_on(EvaluationSizeUnknown())
            self._stop.wait(POLL_S)
        return 0

    def _take_one(self) -> None:
        n = self._subscriber.cursor + 1
        self._subscriber.ask(n)
        try:
            delivery = self._subscriber.read(n, stopped=self._stop.is_set, on_wait=self._check_ended)
        except WaitTimeout:
            return
        found = summarize(delivery.manifest.samples(), self._num_jobs, self._reward_info(delivery.manifest))
        # After a kill, a batch whose rows are already written is delivered again.
        rows = [row for row in found if not self.results.has(row["version"], row["dataset"])]
        self._until_done(partial(add_rows, self._path, rows))
        self._subscriber.commit(n, delivery.digest)
        self._subscriber.checkpointed(n)
        self.results.add(rows)

    def _check_ended(self) -> None:
        """Check whether the newest evaluation ended, as a cohort without remaining jobs is skipped without a batch.

        Blocks for a round trip.
        """
        keys = self._subscriber.keys

        def ask(client: Client) -> Any:
            with client.pipeline(transaction=False) as pipe:
                # Read in the order in which the values grow.
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
        # Requeued prompts that are answered or dead again are not an evaluation.
        is_rest = begun <= version and not unfinished and left < self._num_jobs
        ended = self.results.ended
        if version > ended and cut == self._subscriber.cursor and (left <= 0 or is_rest):
            names = self._subscriber.control.do(lambda client: client.hkeys(keys.source))
            found = (name.removeprefix(b"eval@") for name in names if name.startswith(b"eval@"))
            evaluated = [count_of(one, "A version that was evaluated") for one in found]
            self.results.end(version, sorted(one for one in evaluated if ended < one < version))

    def _reward_info(self, manifest: Manifest) -> dict[tuple[str, int], Any]:
        """Return the reward info of samples if a score needs it. Blocks."""
        if not self._needs_reward_info:
            return {}
        jobs = list(dict.fromkeys(row.job for row in manifest.rows))
        found: dict[tuple[str, int], Any] = {}
        for at in range(0, len(jobs), JOBS_AT_ONCE):
            some = jobs[at : at + JOBS_AT_ONCE]
            for job, data in zip(some, self._records(some), strict=True):
                found |= reward_info_of(job, data)
        return found

    def _records(self, jobs: Sequence[str]) -> list[bytes | None]:
        names = [self._subscriber.keys.meta(job) for job in jobs]
        return self._subscriber.control.do(lambda client: client.mget(names))


def definition(num_jobs: int) -> Definition:
    """Return the definition of a subscription to evaluations of ``num_jobs`` jobs each."""
    return Definition(lanes=(Lane.EVAL,), mode=ASKED, sampler=Sampler.COHORT, size=num_jobs)
