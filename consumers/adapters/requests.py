"""Have a run's workers answer prompts that the trainer chooses itself (verl, TRL).

    answer: admit jobs ─> workers ─> read the batch that holds them ─> commit ─> samples, in the order of the prompts

The answers form a subscription that reads its own lane only: its groups are retired as soon as they are read, and those
of a dead process are cancelled by its successor. Staleness is bounded by the call itself: a job starts only on weights
at least as new as the last publication before it (T12), and every token is checked again.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.config import Config, RolloutConfig
from penstock.config.sampling import temperature_of
from penstock.config.subscription import ASKED, Definition
from penstock.consumers.adapters.prompts import AskedLane, Prompts, Request
from penstock.consumers.adapters.rows import RowArrays, rows_of
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import check_reading
from penstock.consumers.session import RunClient, Session
from penstock.consumers.subscription.rank import job_of
from penstock.consumers.subscription.subscriber import ALONE
from penstock.errors import ConfigError, DiskFull, ProtocolError, WaitTimeout
from penstock.history.eval_rows import FILE, add_rows, summarize
from penstock.protocol.staleness import UNBOUNDED
from penstock.redis.saved_config import config_of

if TYPE_CHECKING:
    from penstock.consumers.weights.sources import Weights

log = logging.getLogger(__name__)

#: Seconds between two checks for dead letters and for the deadline.
LOOK_S = 0.5


class Requests(RunClient):
    """Submit prompts to the workers of a run, await their answers, and publish the weights that generate them.

    Args:
        config, run: as of ``Trainer``; the run needs a buffer and workers, and no producer.
        name: subscription and dataset of the jobs; jobs are named ``NAME/0/NUMBER``.
        lane: ``train`` rejects sampling that hides the distribution (T7); ``eval`` has priority and allows any.

    ``__enter__`` acquires the subscription and ``__exit__`` releases it. One process per name. Weights are published by
    ``publish`` as by any trainer, even if nothing was submitted since the last publication. Not thread-safe.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        name: str = "requests",
        lane: AskedLane = "train",
    ) -> None:
        self.config = config_of(config, run, "Requests")
        self.name = name
        self.lane = lane
        check_reading(self.config, ALONE, None)
        #: Connections of this process, and the jobs that it admits.
        self.session = Session(
            self.config,
            name,
            seat=ALONE,
            definition=self.definition(),
            publishes=self.config.trainer.subscription.driving,
            job=job_of(os.environ),
            records=lane == "train",
        )
        self.prompts = Prompts(self.session, lane)
        #: The batch of the last answers, until it is recorded: the caller trains it after ``answer`` returns.
        self._answered: Batch | None = None
        #: True while jobs of a call may be live.
        self._busy = True
        #: Batches covered by the last publication.
        self._published = -1

    def definition(self, size: int = 1) -> Definition:
        """Define a subscription whose batch is the next ``size`` groups of this lane; it has no model and no bound."""
        return Definition(mode=ASKED, lanes=(self.lane,), size=size, bound=UNBOUNDED)

    def __enter__(self) -> Self:
        self.prompts.ensure_lanes()
        self.prompts.check_alone()
        self.session.join()
        self._clean()
        self._busy = False
        self._published = self.session.progress.position
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def close(self, *, finished: bool = True) -> None:
        """Release the subscription. Blocks shortly.

        Args:
            finished: as of ``Trainer.close``.
        """
        self._record_step()
        self.session.close(finished=finished)

    def answer(
        self, requests: Sequence[Request], timeout: float | None = None, *, takes_parts: bool = False
    ) -> list[list[RowArrays]]:
        """Return the samples of every request, in order, by k; blocks until all are complete (`penstock why`).

        Args:
            takes_parts: a sample of several parts is a row for each, adjacent; else it is refused.

        Raises:
            ProtocolError: a prompt is dead-lettered (with its reason), or a sample's payload is lost. The call's other
                answers are discarded; call again to submit new jobs.
            ConfigError: lane train, and a sample was not sampled at the temperature that its request, or else this
                process's ``rollout.sampling``, names; or its logprobs cannot be trained on (T6).
            WaitTimeout: not complete after ``timeout`` seconds; its answers are discarded likewise.
            OwnershipLost: another process has this name.
        """
        if not requests:
            return []
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._record_step()
        self.session.steps.write()
        if self._busy:
            self._clean()
        version = self.version
        self._busy = True
        try:
            self.session.subscriber.define(self.definition(len(requests)))
            with self.session.tally.waiting("batch"):
                jobs = self.prompts.admit(requests, deadline)
                batch = self._await(set(jobs), deadline)
            wanted = dict(zip(jobs, (one.n for one in requests), strict=True))
            groups = groups_of(batch, wanted, version, takes_parts=takes_parts)
            if self.lane == "train":
                self._check_temperatures(groups, dict(zip(jobs, requests, strict=True)))
        except (ConfigError, ProtocolError, WaitTimeout):
            self._clean()
            raise
        finally:
            self.session.subscriber.waiting.end()
        self._done(batch)
        self._busy = False
        self._answered = batch
        self.session.steps.hand_out(batch.n)
        return [groups[job] for job in jobs]

    def record_evaluation(self, dataset: str, groups: Sequence[Sequence[RowArrays]]) -> None:
        """Append the result of a complete evaluation of the newest version to ``eval.jsonl``, unless it has a row.

        Blocks for the disk and a round trip. A failed write is logged and does not stop training.

        Args:
            groups: what ``answer`` returned for all prompts of ``dataset``.
        """
        version = self.version
        rows = [replace(one.row, job=f"{dataset}/{version}/{i}") for i, group in enumerate(groups) for one in group]
        file = self.config.run_dir / FILE
        try:
            add_rows(file, summarize(rows, len(groups)))
        except (DiskFull, OSError) as exc:
            log.warning("failed to write the evaluation of version %d on %s to %s: %s", version, dataset, file, exc)

    def publish(self, weights: "Weights", *, step: int | None = None, timeout: float = 600.0) -> int:
        """Publish like ``Trainer.publish``, with or without answers since the last publication; lane train only."""
        if self.lane != "train":
            raise ConfigError("Publish with the requests of lane train: one subscription moves the clock.")
        self._record_step()
        if self._published == self.session.progress.position:
            # To Redis this looks like a trainer restored to its current position.
            self.session.go_back(self._published, self.session.clock.seen)
        with self.session.steps.publishing():
            version = self.session.publisher.publish(weights, step=step, timeout_s=timeout)
        self._published = self.session.progress.position
        return version

    def temperature(self, sampling: Mapping[str, Any]) -> float:
        """Return the temperature of a request with ``sampling``, by the configuration of this process."""
        return temperature_of(self.config.rollout.sampling | dict(sampling))

    def _await(self, jobs: set[str], deadline: float) -> Batch:
        """Wait for the batch that holds exactly ``jobs``; skip one cut for an earlier call."""
        while True:
            n = self.session.subscriber.cursor + 1
            self.session.subscriber.ask(n)
            batch = self._read(n, jobs, deadline)
            found = {row.job for row in batch.all_rows}
            if found == jobs:
                return batch
            self._done(batch)
            if found & jobs:
                raise ProtocolError(
                    f"Batch {n} of {self.name!r} holds {len(found & jobs)} of {len(jobs)} prompts of this call and "
                    "some of another: only one process may admit jobs under this name."
                )

    def _read(self, n: int, jobs: set[str], deadline: float) -> Batch:
        while True:
            try:
                timeout_s = min(LOOK_S, max(0.0, deadline - time.monotonic()))
                batch = self.session.reader.read(self.session.subscriber.read(n, timeout_s))
                batch.trained = self.lane == "train"
                return batch
            except WaitTimeout as exc:
                self.prompts.check_buried(jobs)
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"The answers to {len(jobs)} prompts of {self.name!r} did not arrive in time: {exc}",
                        count=exc.count,
                        cause=exc.cause,
                    ) from None

    def _check_temperatures(self, groups: Mapping[str, Sequence[RowArrays]], requests: Mapping[str, Request]) -> None:
        """Check the temperatures of the samples: workers read another configuration file than the trainer does."""
        for job, rows in groups.items():
            wanted = self.temperature(requests[job].sampling)
            behaviour.check_temperature([one.row for one in rows], wanted, "This call", "what was asked for")

    def _done(self, batch: Batch) -> None:
        """Commit a batch whose answers are read, so that it is never read again."""
        self.session.commit(batch, is_trained=False)
        self.session.progress.state()
        self.session.progress.checkpointed()

    def _record_step(self) -> None:
        """Record the batch of the last answers, which is trained by now."""
        if self._answered is not None:
            self.session.steps.commit(self._answered.manifest)
            self._answered = None

    def _clean(self, jobs: Sequence[str] | None = None) -> None:
        """Commit cut batches, then cancel ``jobs``, or with None all that earlier calls or processes left (by scan)."""
        while True:
            for batch in self.prompts.unread():
                self._done(batch)
            # Order matters: the buffer may have cut a batch of these jobs meanwhile, but cuts none after it was
            # committed.
            if self.prompts.cancel(jobs):
                return


def eval_sampling(sampling: Mapping[str, Any], rollout: RolloutConfig, most_new_tokens: int | None) -> dict[str, Any]:
    """Return the ``sampling`` of requests for lane eval; keys of ``rollout.eval_sampling`` are left out.

    Args:
        most_new_tokens: limit of an answer's length that ``eval_sampling`` may not exceed; None: no limit.
    """
    own = {name: value for name, value in sampling.items() if name not in rollout.eval_sampling}
    named = rollout.eval_sampling.get("max_new_tokens")
    if most_new_tokens is not None and named is not None and named > most_new_tokens:
        own["max_new_tokens"] = most_new_tokens
    return own


def groups_of(
    batch: Batch, wanted: Mapping[str, int], version: int, *, takes_parts: bool = False
) -> dict[str, list[RowArrays]]:
    """Return the samples by job, ordered by k; raise if one is missing or older than ``version`` (T12)."""
    groups: dict[str, list[RowArrays]] = {job: [] for job in wanted}
    for one in rows_of(batch):
        groups[one.row.job].append(one)
        if one.row.begin >= 0 and not takes_parts:
            raise ProtocolError(
                f"Sample {one.row.payload_id} has several parts, and an answer is one sequence here: let penstock's "
                "producer read the prompts, and train its batches."
            )
        if one.lost:
            raise ProtocolError(f"The payload of sample {one.row.sample} is gone: ask again.")
        if 0 <= one.row.oldest < version:
            raise ProtocolError(
                f"Sample {one.row.sample} holds tokens of version {one.row.oldest}, but was asked of version {version}."
            )
    for job, n in wanted.items():
        groups[job].sort(key=lambda one: (one.row.k, one.row.part))
        if (found := len({one.row.k for one in groups[job]})) != n:
            raise ProtocolError(f"Job {job} has {found} answers instead of {n}: its group was closed early.")
    return groups
