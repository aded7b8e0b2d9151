"""Prompts of one's own, answered by a run's workers: for trainers that choose the prompts themselves (verl, TRL).

    answer: admit jobs ─> workers ─> read the batch that holds them ─> commit ─> samples, in the order of the prompts

The answers form a subscription of their own that reads its lane alone: its groups are retired as soon as they are
read, and those of a process that died are cancelled by the next one. Nothing bounds staleness here but the call
itself: a job is started only on weights at least as new as those published before it (T12), which is checked again on
every token.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from consumers.adapters.rows import RowArrays, rows_of
from consumers.batch import behaviour
from consumers.batch.batch import Batch
from consumers.trainer import Trainer
from penstock.config import Config, RolloutConfig
from penstock.config.sampling import temperature_of
from penstock.errors import ConfigError, ProtocolError, QueueFull, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.audit import scan_groups
from penstock.protocol.records.job import Job
from penstock.redis.control import Client

#: Jobs admitted per verb.
CHUNK = 128
#: How often a wait looks for prompts that were given up; how late a time-out is seen.
LOOK_S = 0.5

Lane = Literal["train", "eval"]

#: The subscription: no model, so no bound; a batch is the first ``size`` groups, and ``answer`` sets the size.
DEFINITION: dict[str, scripts.Value] = {
    "mode": "eval", "bound": -1, "sampler": "fifo", "size": 1, "per_version": 1, "reuse": 1, "driving": 0, "model": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered ``n`` times; fields as of ``penstock.Job``."""

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    n: int = 1
    label: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    environment: str | None = None


class Requests(Trainer):
    """A trainer whose batches are the answers to its own prompts.

    Args:
        config, run: as of ``Trainer``; the run needs a buffer and workers, and no producer.
        name: subscription and dataset of the jobs; jobs are named ``NAME/0/NUMBER``.
        lane: ``train`` refuses sampling that hides the distribution (T7); ``eval`` goes before it and allows any.

    One process per name. Weights are published by ``publish`` as by any trainer, also where nothing was asked since
    the last publication. Not thread-safe.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        name: str = "requests",
        lane: Lane = "train",
    ) -> None:
        super().__init__(config, run=run, name=name, definition=DEFINITION | {"lanes": lane})
        self.lane = lane
        #: True while jobs of a call may be live.
        self._busy = True
        #: Batches behind the last publication.
        self._published = -1

    def __enter__(self) -> Self:
        self._check_alone()
        super().__enter__()
        self._clean()
        self._busy = False
        self._published = self.position
        return self

    def next(self, timeout: float | None = None) -> Batch:
        raise ProtocolError("These batches are answers to prompts: call answer() with them.")

    def answer(self, requests: Sequence[Request], timeout: float | None = None) -> list[list[RowArrays]]:
        """The samples of every request, in order, k ascending; blocks until all are there (`penstock why`).

        Raises:
            ProtocolError: a prompt was given up (buried, with its reason), or a sample's payload is lost. Nothing
                of this call comes later; asking again asks anew.
            ConfigError: lane train, and a sample was not drawn at the temperature that its request, or else this
                process's ``rollout.sampling``, names; or its logprobs cannot be trained on (T6).
            WaitTimeout: not all were there in ``timeout`` seconds; likewise.
            OwnershipLost: another process has this name.
        """
        if not requests:
            return []
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        if self._busy:
            self._clean()
        version = self.version
        self._busy = True
        try:
            self._subscriber.define({"size": len(requests)})
            jobs = self._admit(requests, deadline)
            batch = self._await(set(jobs), deadline)
            groups = _groups(batch, dict(zip(jobs, (one.n for one in requests), strict=True)), version)
            if self.lane == "train":
                self._check_temperatures(groups, dict(zip(jobs, requests, strict=True)))
        except (ConfigError, ProtocolError, WaitTimeout):
            self._clean()
            raise
        finally:
            self._subscriber.waiting.end()
        self._done(batch)
        self._busy = False
        return [groups[job] for job in jobs]

    def publish(self, weights: Any, *, step: int = 0, timeout: float = 600.0) -> int:
        """As ``Trainer.publish``, but nothing need have been asked since the last publication; lane train only."""
        if self.lane != "train":
            raise ConfigError("Publish with the requests of lane train: one subscription moves the clock.")
        if self._published == self.position:
            # To Redis it is a trainer that was restored to where it stands.
            self.load_state_dict(self.state_dict())
        version = super().publish(weights, step=step, timeout=timeout)
        self._published = self.position
        return version

    # --- one call -------------------------------------------------------------------------------------------------

    def _admit(self, requests: Sequence[Request], deadline: float) -> list[str]:
        """Admit all; their ids. Waits for room in Redis."""
        jobs: list[str] = []
        for first in range(0, len(requests), CHUNK):
            chunk = requests[first : first + CHUNK]
            while (position := self._admit_chunk(chunk)) < 0:
                self._subscriber.waiting.for_("room in Redis, to admit prompts: sweep, or more memory")
                if time.monotonic() >= deadline:
                    raise WaitTimeout("Redis had no room for the prompts: raise its maxmemory.")
                time.sleep(LOOK_S)
            jobs += [f"{self.name}/0/{position + i}" for i in range(len(chunk))]
        return jobs

    def _admit_chunk(self, requests: Sequence[Request]) -> int:
        """Number of the first job, or -1 when Redis is full."""
        control = self._subscriber.control
        while True:
            position = int(control.do(lambda client: client.hget(self.keys.source, self.name)) or 0)
            jobs = [_job(f"{self.name}/0/{position + i}", one, self.lane) for i, one in enumerate(requests)]
            try:
                done = control.call(
                    scripts.admit(
                        self.keys,
                        [(job, job.to_bytes()) for job in jobs],
                        lane=self.lane,
                        source=self.name,
                        position=position,
                        model=self.model_name,
                        gate=None,
                    )
                )
            except QueueFull:
                return -1
            if done.outcome == "ok":
                return position

    def _await(self, jobs: set[str], deadline: float) -> Batch:
        """The batch that holds just ``jobs``; one cut for a call before this one is passed over."""
        while True:
            n = self._subscriber.cursor + 1
            self._subscriber.ask(n)
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
                batch = self._make(self._subscriber.read(n, min(LOOK_S, max(0.0, deadline - time.monotonic()))))
                batch.trained = self.lane == "train"
                return batch
            except WaitTimeout:
                self._check_buried(jobs)
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"The answers to {len(jobs)} prompts of {self.name!r} were not there in time: `penstock why` "
                        "says what they wait for."
                    ) from None

    def _check_buried(self, jobs: set[str]) -> None:
        def states(client: Any) -> list[bytes | None]:
            pipe = client.pipeline(transaction=False)
            for job in jobs:
                pipe.hget(self.keys.group(job), "st")
            return list(pipe.execute())

        found = zip(jobs, self._subscriber.control.do(states), strict=True)
        buried = sorted(job for job, state in found if state == b"dead")
        if buried:
            raise ProtocolError(
                f"{len(buried)} of {len(jobs)} prompts were given up by the workers, {buried[0]} as: "
                f"{self._why(buried[0])}"
            )

    def _why(self, job: str) -> str:
        for _, entry in self._subscriber.control.do(lambda client: client.xrevrange(self.keys.dead, count=1000)):
            if entry.get(b"id") == job.encode():
                return f"{entry[b'reason'].decode()}: {entry[b'detail'].decode(errors='replace')[-2000:]}"
        return "its dead letter is gone."

    def temperature(self, sampling: Mapping[str, Any]) -> float:
        """What a request of such a ``sampling`` is to be drawn at, by the configuration of this process."""
        return temperature_of(self.config.rollout.sampling | dict(sampling))

    def _check_temperatures(self, groups: Mapping[str, Sequence[RowArrays]], requests: Mapping[str, Request]) -> None:
        """The worker's configuration is another file: what it drew at must be what the trainer will divide by."""
        for job, rows in groups.items():
            wanted = self.temperature(requests[job].sampling)
            behaviour.check_temperature([one.row for one in rows], wanted, "This call", "what was asked for")

    def _done(self, batch: Batch) -> None:
        """Read, and never to be read again."""
        self.commit(batch)
        self._next = batch.n + 1
        self.state_dict()
        self.checkpointed()

    # --- order ----------------------------------------------------------------------------------------------------

    def _check_alone(self) -> None:
        """Another subscription of this lane would be handed our answers, and hold them."""
        for name in self._live_subs():
            lanes = self._subscriber.control.do(partial(_lanes, self.keys.sub(name)))
            if name != self.name and self.lane in lanes:
                raise ConfigError(
                    f"Lane {self.lane} of run {self.config.run!r} belongs to subscription {name!r} already: "
                    "take a run of its own for prompts that a trainer submits itself."
                )

    def _live_subs(self) -> list[str]:
        raw = self._subscriber.control.do(lambda client: client.hgetall(self.keys.subs))
        return sorted(field.decode()[4:] for field in raw if field.startswith(b"sub:"))

    def _clean(self) -> None:
        """Let go of whatever an earlier call or process left: cut batches, then live jobs. Blocks for a scan each."""
        subs = self._live_subs()
        while True:
            for batch in self._cut():
                self._done(batch)
            mine = f"{self.name}/0/"
            found = self._subscriber.control.do(lambda client: list(scan_groups(client, self.keys)))
            calls = [scripts.cancel(self.keys, job, subs) for job in found if job.startswith(mine)]
            # What was asked before stands: the buffer may have cut a batch of these jobs since, and none again
            # once that is read.
            if "cut" not in [self._subscriber.control.call(call) for call in calls]:
                return

    def _cut(self) -> Iterator[Batch]:
        """Batches that were cut and not committed."""
        cut = int(self._subscriber.control.do(lambda client: client.hget(self.keys.sub(self.name), "cut")) or 0)
        for n in range(self._subscriber.cursor + 1, cut + 1):
            delivery = self._subscriber.read(n, LOOK_S)
            yield Batch(delivery.manifest, digest=delivery.digest, payloads={})


def eval_sampling(sampling: Mapping[str, Any], rollout: RolloutConfig, most_new_tokens: int | None) -> dict[str, Any]:
    """``sampling`` of requests for lane eval: what ``rollout.eval_sampling`` names is left to it.

    Args:
        most_new_tokens: what an answer must not be longer than, whatever ``eval_sampling`` says; None: no limit.
    """
    own = {name: value for name, value in sampling.items() if name not in rollout.eval_sampling}
    named = rollout.eval_sampling.get("max_new_tokens")
    if most_new_tokens is not None and named is not None and named > most_new_tokens:
        own["max_new_tokens"] = most_new_tokens
    return own


def _lanes(sub: str, client: Client) -> list[str]:
    return str((client.hget(sub, "lanes") or b"train").decode()).split(",")


def _job(name: str, request: Request, lane: Lane) -> Job:
    fields: Mapping[str, Any] = {key: getattr(request, key) for key in Request.__slots__}
    return Job(name, lane=lane, **fields)


def _groups(batch: Batch, wanted: Mapping[str, int], version: int) -> dict[str, list[RowArrays]]:
    """Job -> its samples, k ascending, checked: all there, none older than the weights they were asked of (T12)."""
    groups: dict[str, list[RowArrays]] = {job: [] for job in wanted}
    for one in rows_of(batch):
        groups[one.row.job].append(one)
        if one.lost:
            raise ProtocolError(f"The payload of sample {one.row.sample} is gone: ask again.")
        if 0 <= one.row.oldest < version:
            raise ProtocolError(
                f"Sample {one.row.sample} holds tokens of version {one.row.oldest}, but was asked of version {version}."
            )
    for job, n in wanted.items():
        groups[job].sort(key=lambda one: one.row.k)
        if len(groups[job]) != n:
            raise ProtocolError(f"Job {job} has {len(groups[job])} answers instead of {n}: its group was closed early.")
    return groups
