"""Run a worker's jobs from lease to end: generate, reward, commit; or fail, crash, release.

lease ─> n samples: slot ─> generate ─> reward ─> commit     (each k separately, commits coalesced)
           │ all committed, group reward configured: compute it (rewards/group_phase.py)
           │ engine died: write prefixes, report, requeue (crash)
           │ reward or answer invalid: retry later, then dead letter (fail); the other samples finish first, and
           │   prefixes are kept, so that a retried reward scores the same answer
           │ permanent error: dead letter at once with its reason (fail, 0 attempts)
           │ a sample used up the lease's tokens: free its slot; when its siblings are done, requeue the job with
           │   its prefixes, without a charge (release)
           └ lease lost: stop and write nothing (I3)

A failed sample ends its job only after its siblings are done, unless the failure affects all of them.
"""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import (
    ConfigError,
    EngineDied,
    EngineRefused,
    LeaseLost,
    PayloadError,
    PenstockError,
    ProtocolError,
    QueueFull,
)
from penstock.model.pictures import Pictures
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.scripts import Committed, RawLease
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample, SampleStatus
from penstock.system.logs import of_job
from penstock.text import format_exc, utf8_safe
from penstock.workers.jobs.failure import FailureReport, failure_of
from penstock.workers.jobs.heartbeat import Lease
from penstock.workers.jobs.job_sampler import JobSampler
from penstock.workers.jobs.prefixes import Prefix, read_prefixes
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.scoring import check_answers
from penstock.workers.rewards.group_phase import GroupPhase
from penstock.workers.rewards.kinds.boxed import last_box
from penstock.workers.services import Services

log = logging.getLogger(__name__)

#: Keys of ``reward_info``. A reward that reports the answer it extracted sets the first one itself.
PRED, CATEGORY = "pred", "category"
#: Longest values, in characters; a longer text is not a final answer.
MAX_PRED, MAX_CATEGORY = 256, 64


def add_eval_info(sample: Sample, datasets: Iterable[DatasetConfig]) -> None:
    """Add the category to a scored evaluation sample, and the final answer if the prompt has several samples to vote.

    Args:
        datasets: the held-out datasets.
    """
    job = sample.job
    if job.lane != Lane.EVAL:
        return
    if job.n > 1 and PRED not in sample.reward_info:
        sample.reward_info[PRED] = result_of(sample.text)
    key = next((one.category_key for one in datasets if one.name == job.dataset), None)
    if key is not None and (category := _name(job.metadata.get(key))):
        sample.reward_info[CATEGORY] = category


def result_of(text: str) -> str:
    r"""Return the final answer: the content of the last ``\boxed{}``, else a short text as it is, else ''."""
    found = last_box(text)
    spelled = " ".join((text if found is None else found).split())
    return utf8_safe(spelled) if len(spelled) <= MAX_PRED else ""


def _name(value: Any) -> str:
    """Convert a category to text; return '' if it is neither text nor a number."""
    return utf8_safe(str(value))[:MAX_CATEGORY].strip() if isinstance(value, str | int | float) else ""


#: Longest wait for commits in flight before a job is handed back.
SETTLE_S = 5.0
#: Permanent failures, which every sample and every retry of the job would hit.
REFUSED = (ConfigError, ProtocolError, EngineRefused)
AT_ONCE = (EngineDied, LeaseLost, *REFUSED)


class HeldJob:
    """Run a leased job until it is committed, failed, handed back or lost."""

    def __init__(self, services: Services, lease: RawLease) -> None:
        self._services = services
        self.lease = lease
        self._refused: PenstockError | None = None
        #: Record of the job, once read.
        self._record: Job | None = None
        self._temperature = 1.0
        #: Images of the prompt; None without images.
        self._pictures: Pictures | None = None
        #: k of uncommitted samples.
        self._missing: list[int] = []
        #: k of samples that wait for a slot or are being generated.
        self._ungenerated: set[int] = set()
        self._group = GroupPhase(services, lease)
        #: Samples in progress, or finished and not committed, by k.
        self.samples: dict[int, Sample] = {}
        self._prefixes: dict[int, Prefix] = {}
        #: Commits in flight, with their k.
        self._writes: dict[asyncio.Future[Committed], int] = {}
        self.task: asyncio.Task[None] | None = None
        #: True once another worker is known to have the lease.
        self.lost = False
        self._releasing = False
        #: The error that ends the worker; '' unless it dies.
        self._death = ""
        #: True once its outcome is being written to Redis, which must not be interrupted.
        self._ending = False
        try:
            self._job = self._read()
        except (ProtocolError, ConfigError) as exc:
            self._refused = exc

    def _read(self) -> Job:
        job = self._record = self.lease.read()
        sampling = sampling_for(job, self._services.config.rollout)  # raises before anything is generated
        check_answers(job)
        self._services.rewards.check(job)
        self._services.environments.check(job)
        self._group.begin(job)
        self._temperature = float(sampling["temperature"])
        self._sampler = JobSampler(self._services, job, self.lease.attempts)
        self._services.frozen.check(job, self._temperature)
        self._missing = [] if self._group.is_due else [k for k in range(job.n) if k not in self.lease.committed]
        self._ungenerated = set(self._missing)
        return job

    @property
    def job(self) -> str:
        return self.lease.job

    @property
    def num_ungenerated(self) -> int:
        """Number of samples that wait for a slot or are being generated."""
        return len(self._ungenerated)

    @property
    def num_open(self) -> int:
        """Number of samples that are uncommitted, or whose group needs a reward."""
        return self._group.num_open or len(self._missing)

    @property
    def is_ending(self) -> bool:
        """Whether a call in flight may already have ended the lease."""
        return self._ending or bool(self._writes)

    def start(self) -> "asyncio.Task[None]":
        """Start ``run`` as a task."""
        self.task = asyncio.create_task(self.run(), name=f"job {self.job}")
        return self.task

    def lose(self) -> None:
        """Stop at once and write nothing, because another worker has the lease."""
        self.lost = True
        for write in self._writes:
            write.cancel()
        self._stop()

    def release(self, death: str = "") -> None:
        """Hand the job back with the tokens generated so far.

        Args:
            death: error that ends the worker; '': the job is not charged.
        """
        self._releasing, self._death = True, death
        self._stop()

    def _stop(self) -> None:
        if self.task is not None and not self._ending:
            self.task.cancel()

    async def run(self) -> None:
        """Process the job until it is committed, failed, crashed, released or lost."""
        with of_job(self.job), self._services.open_calls.recording():
            await self._run()

    async def _run(self) -> None:
        failure: Exception | None = None
        try:
            await self._work()
            if not self._missing:
                return
        except asyncio.CancelledError:
            if not self.lost and not self._releasing:
                raise
        except Exception as exc:
            failure = exc
        finally:
            self._ungenerated.clear()
        self._ending = True
        if self.lost or isinstance(failure, LeaseLost):
            self._on_lease_lost()
            return
        try:
            await (self._hand_back() if failure is None else self._charge(failure))
        except LeaseLost:
            self._on_lease_lost()

    async def _charge(self, failure: Exception) -> None:
        report = FailureReport(self._services, self.lease, self._record, self._keep_prefixes, self._uncommitted_usage)
        await report.send(failure)

    def _on_lease_lost(self) -> None:
        self.lost = True
        self._services.tally.lost_leases += 1
        log.warning("lost the lease of job %s; discarding its results", self.job)

    async def _work(self) -> None:
        if self._refused is not None:
            raise self._refused
        self._pictures = await self._sampler.pictures()
        prefixes = await self._read_prefixes()
        samples = [self._begin(prefixes.get(k) or Sample(self._job, k)) for k in self._missing]
        together = self._generate_group(samples)
        tasks = {asyncio.create_task(self._sample(sample, together), name=f"sample {sample.id}") for sample in samples}
        try:
            await self._wait_for_all(tasks)
        finally:
            all_of_them = tasks if together is None else {*tasks, together}
            for task in all_of_them:
                task.cancel()
            # Cancelled samples still fetch their generated tokens from the engine.
            await asyncio.gather(*all_of_them, return_exceptions=True)
        if self._group.is_due and not self._missing:
            await self._reward_group()

    async def _reward_group(self) -> None:
        await self._group.score()
        self._ending = True  # the write ends the lease and must not be interrupted
        await self._group.write()
        self._count_group()

    async def _wait_for_all(self, tasks: set["asyncio.Task[None]"]) -> None:
        """Wait for all samples, then raise the first failure; raise failures that affect all samples at once."""
        pending, first = tasks, None
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                failure = failure_of(task)
                if isinstance(failure, AT_ONCE):
                    raise failure
                first = first or failure
        if first is not None:
            raise first

    async def _read_prefixes(self) -> dict[int, Sample]:
        if self.lease.lane not in (Lane.RESUME, Lane.SUSPECT):
            return {}
        return await read_prefixes(self._services, self._job, self.lease.token, self._missing, self._temperature)

    def _begin(self, sample: Sample) -> Sample:
        sample.pictures = self._pictures
        self.samples[sample.k] = sample
        self._prefixes[sample.k] = Prefix(self._services, self.lease.token, sample, self._temperature)
        return sample

    def _generate_group(self, samples: list[Sample]) -> "asyncio.Task[None] | None":
        """Start one call that generates all samples that are not given; return None if each has its own request."""
        generated = [sample for sample in samples if not self._sampler.is_given(sample.k)]
        if not generated or not self._sampler.generates_group:
            return None
        return asyncio.create_task(
            self._sampler.generate_group(generated, [self._prefixes[sample.k].account for sample in generated]),
            name=f"group {self.job}",
        )

    async def _sample(self, sample: Sample, together: "asyncio.Task[None] | None") -> None:
        services, prefix = self._services, self._prefixes[sample.k]
        resumed = sum(sample.generated)
        try:
            if together is not None and not self._sampler.is_given(sample.k):
                await asyncio.shield(together)  # the requests of the call hold the slots
            else:
                async with services.slot():
                    sample = await self._sampler.generate(sample, prefix)
        finally:
            self._ungenerated.discard(sample.k)
            services.room.set()
            if sample.status != SampleStatus.GIVEN:
                services.tally.generated_tokens += max(0, sum(sample.generated) - resumed)
        await prefix.settle()
        if sample.status == SampleStatus.ABORTED:
            return  # the sample used up its tokens of this lease
        if self._job.lane != Lane.SCORE:
            await services.sample_hooks.apply(sample)
            if sample.reward is None:
                await services.rewards.score(sample)
            else:
                services.rewards.take(sample)
            add_eval_info(sample, services.config.data.eval)
            if services.frozen.scores(sample):
                await services.frozen.score(sample)
        await self._commit(sample)

    async def _commit(self, sample: Sample) -> None:
        services = self._services
        # The engine scores at temperature 1, whatever the sampling temperature.
        scale = self._temperature, services.engine.logprob_kind
        was_scored = sample.status == SampleStatus.GIVEN or self._job.lane == Lane.SCORE
        temperature, kind = (1.0, "scaled") if was_scored else scale
        account = self._prefixes[sample.k].account
        write = services.commits.submit(
            self.job, self.lease.token, [sample], temperature, kind, [account], with_reward=self._group.is_wanted
        )
        self._writes[write] = sample.k
        self._on_commit(write, await asyncio.shield(write))

    def _on_commit(self, write: "asyncio.Future[Committed]", done: Committed) -> None:
        k = self._writes.pop(write)
        if done.outcome == "lost":
            raise LeaseLost(f"job {self.job}")
        sample, tally = self.samples.pop(k, None), self._services.tally
        self._missing.remove(k)
        tally.committed(sample)
        self._group.note(sample, done)
        if not self._missing and not self._group.is_due:
            self._count_group()

    def _count_group(self) -> None:
        self._services.tally.committed_groups += 1
        self._services.outcomes.add(self._job)

    async def _hand_back(self) -> None:
        await self._keep_prefixes()
        services = self._services
        call = scripts.release(
            services.keys,
            self.job,
            self.lease.token,
            self._uncommitted_usage(),
            worker=services.worker,
            death=self._death,
        )
        await services.control.call(call)
        services.tally.handed_back += 1

    def _uncommitted_usage(self) -> dict[int, Drawn]:
        """Return the token usage of the uncommitted samples, by k."""
        return {k: self._prefixes[k].usage(at_end=True) for k in self.samples}

    async def _keep_prefixes(self) -> None:
        """Write prefixes of uncommitted samples; if Redis is full, log a warning and lose them."""
        await self._settle()
        for k, sample in list(self.samples.items()):
            try:
                if any(sample.generated):
                    await self._prefixes[k].keep_all()
            except QueueFull as exc:
                log.warning("prefix of sample %s lost: %s", sample.id, exc)
                return
            except PayloadError as exc:
                log.warning("prefix of sample %s/%d lost: %s", self.job, k, format_exc(exc))

    async def _settle(self) -> None:
        """Wait for commits in flight; discard commits that a full Redis refuses."""
        if not self._writes:
            return
        await asyncio.wait(self._writes, timeout=SETTLE_S)
        for write in list(self._writes):
            if write.done() and not write.cancelled() and write.exception() is None:
                self._on_commit(write, write.result())
            write.cancel()
        self._writes.clear()


class HeldJobs(dict[str, HeldJob]):
    """Map job ids to running jobs. Create and modify it in the worker's event loop only."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        #: Gets the unexpected error that ended a job's task; otherwise never done.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Leases reported lost at the last renewal that a call in flight may have ended.
        self._doubtful: set[Lease] = set()

    @property
    def num_ungenerated(self) -> int:
        """Number of samples that wait for a slot or are being generated."""
        return sum(held.num_ungenerated for held in self.values())

    @property
    def num_open(self) -> int:
        """Number of uncommitted samples."""
        return sum(held.num_open for held in self.values())

    @property
    def num_suspects(self) -> int:
        """Number of jobs of the lane ``suspect``."""
        return sum(held.lease.lane == Lane.SUSPECT for held in self.values())

    def take(self, lease: RawLease) -> None:
        """Start a leased job."""
        held = HeldJob(self._services, lease)
        before = self.get(held.job)
        if before is not None:
            # A new lease of the same job means that the earlier one is over.
            before.lose()
        self[held.job] = held
        held.start().add_done_callback(partial(self._forget, held))

    def _forget(self, held: HeldJob, task: "asyncio.Task[None]") -> None:
        if self.get(held.job) is held:
            del self[held.job]
        self._services.room.set()
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not self.failed.done():
            self.failed.set_exception(failure)

    def leases(self) -> list[Lease]:
        """Return the leases not known to be lost. Thread-safe."""
        return [(job, held.lease.token) for job, held in list(self.items()) if not held.lost]

    def lose(self, gone: set[Lease]) -> None:
        """Stop jobs that another worker has leased.

        Args:
            gone: all leases that other workers held at this renewal.
        """
        for job, token in gone:
            held = self.get(job)
            # A commit in flight may have ended the lease: wait for its reply or the next renewal.
            if held and held.lease.token == token and (not held.is_ending or (job, token) in self._doubtful):
                held.lose()
        self._doubtful = gone

    def release(self, death: str = "") -> None:
        """Hand back all jobs; returns at once. ``death`` is the error that ends the worker, '' if it drains."""
        for held in list(self.values()):
            held.release(death)

    async def ended(self) -> None:
        """Wait until all jobs have ended."""
        while tasks := [held.task for held in self.values() if held.task is not None]:
            await asyncio.wait(tasks)
