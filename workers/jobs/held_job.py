"""The jobs of a worker, each from its lease to its end: generate, reward, commit; or fail, crash, release.

lease ─> n samples: slot ─> generate ─> reward ─> commit     (each k separately, commits coalesced)
           │ all committed, and the group has a reward: that comes next (rewards/groups/group_phase.py)
           │ engine died: write prefixes, report, requeue (crash)
           │ reward has no number, answer is garbage: retry later, then dead letter (fail); the other samples finish
           │   first, and prefixes are kept, so that a retried reward scores the same answer
           │ can never work: dead letter at once with its reason (fail, 0 attempts)
           │ a sample used up its tokens of this lease: free its slot; when its siblings are done, requeue the job
           │   with its prefixes, at no charge (release)
           └ lease lost: everything stops, nothing is written (I3)

A failed sample ends its job only when its siblings are done, unless the failure concerns all of them.
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
from penstock.workers.jobs.drawing import Drawing
from penstock.workers.jobs.failure import Charge, failure_of
from penstock.workers.jobs.heartbeat import Lease
from penstock.workers.jobs.prefixes import Prefix, read_prefixes
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.scoring import check_answers
from penstock.workers.rewards.group_phase import GroupPhase
from penstock.workers.rewards.kinds.boxed import last_box
from penstock.workers.services import Services

log = logging.getLogger(__name__)

#: Entries of ``reward_info``. A reward that reports which answer it read sets the first itself.
PRED, CATEGORY = "pred", "category"
#: Longest of either, in characters: a longer text is no final answer.
MAX_PRED, MAX_CATEGORY = 256, 64


def note(sample: Sample, datasets: Iterable[DatasetConfig]) -> None:
    """Add both to a scored sample of lane ``eval``; the final answer only if its prompt has several samples, to vote.

    Args:
        datasets: the held-out ones.
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
    r"""Return the final answer: the content of the last ``\boxed{}``, else all of a short answer; '' if none."""
    found = last_box(text)
    spelled = " ".join((text if found is None else found).split())
    return utf8_safe(spelled) if len(spelled) <= MAX_PRED else ""


def _name(value: Any) -> str:
    """Return a category as text; '' if it is neither text nor a number."""
    return utf8_safe(str(value))[:MAX_CATEGORY].strip() if isinstance(value, str | int | float) else ""


#: Longest wait for commits in flight before a job is handed back.
SETTLE_S = 5.0
#: Failures that every sample of the job, and every further attempt, would meet.
REFUSED = (ConfigError, ProtocolError, EngineRefused)
AT_ONCE = (EngineDied, LeaseLost, *REFUSED)


class HeldJob:
    """A job that this worker holds. ``run`` ends when the job is committed, failed, handed back or lost."""

    def __init__(self, services: Services, lease: RawLease) -> None:
        self._services = services
        self.lease = lease
        self._refused: PenstockError | None = None
        #: Its record, once read.
        self._record: Job | None = None
        self._temperature = 1.0
        #: Images of its prompt; None if it has none.
        self._pictures: Pictures | None = None
        #: k of samples that are not committed.
        self._missing: list[int] = []
        #: k of samples that wait for a slot or are being generated.
        self._undrawn: set[int] = set()
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
        self._drawing = Drawing(self._services, job, self.lease.attempts)
        self._services.frozen.check(job, self._temperature)
        self._missing = [] if self._group.is_due else [k for k in range(job.n) if k not in self.lease.committed]
        self._undrawn = set(self._missing)
        return job

    @property
    def job(self) -> str:
        return self.lease.job

    @property
    def num_undrawn(self) -> int:
        """Samples that wait for a slot or are being generated."""
        return len(self._undrawn)

    @property
    def num_open(self) -> int:
        """Samples that are not committed, or whose group needs a reward."""
        return self._group.num_open or len(self._missing)

    @property
    def is_ending(self) -> bool:
        """True while a call in flight may have ended the lease itself."""
        return self._ending or bool(self._writes)

    def start(self) -> "asyncio.Task[None]":
        """Run in a task of its own."""
        self.task = asyncio.create_task(self.run(), name=f"job {self.job}")
        return self.task

    def lose(self) -> None:
        """Stop at once and write nothing: another worker has the lease."""
        self.lost = True
        for write in self._writes:
            write.cancel()
        self._stop()

    def release(self, death: str = "") -> None:
        """Hand the job back with the tokens generated so far.

        Args:
            death: the error that ends the worker; '': the job is not charged.
        """
        self._releasing, self._death = True, death
        self._stop()

    def _stop(self) -> None:
        if self.task is not None and not self._ending:
            self.task.cancel()

    async def run(self) -> None:
        """Work until the job is committed, failed, crashed, released or lost."""
        with of_job(self.job), self._services.open_calls.hears():
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
            self._undrawn.clear()
        self._ending = True
        if self.lost or isinstance(failure, LeaseLost):
            self._note_loss()
            return
        try:
            await (self._hand_back() if failure is None else self._charge(failure))
        except LeaseLost:
            self._note_loss()

    async def _charge(self, failure: Exception) -> None:
        await Charge(self._services, self.lease, self._record, self._keep_prefixes, self._uncommitted_usage).make(
            failure
        )

    def _note_loss(self) -> None:
        self.lost = True
        self._services.tally.lost_leases += 1
        log.warning("lost the lease of job %s; nothing more of it is written", self.job)

    async def _work(self) -> None:
        if self._refused is not None:
            raise self._refused
        self._pictures = await self._drawing.pictures()
        prefixes = await self._read_prefixes()
        samples = [self._begin(prefixes.get(k) or Sample(self._job, k)) for k in self._missing]
        together = self._draw_together(samples)
        tasks = {asyncio.create_task(self._sample(sample, together), name=f"sample {sample.id}") for sample in samples}
        try:
            await self._wait_for_all(tasks)
        finally:
            all_of_them = tasks if together is None else {*tasks, together}
            for task in all_of_them:
                task.cancel()
            # Cancelled samples fetch the tokens the engine has generated for them.
            await asyncio.gather(*all_of_them, return_exceptions=True)
        if self._group.is_due and not self._missing:
            await self._reward_group()

    async def _reward_group(self) -> None:
        await self._group.score()
        self._ending = True  # this ends the lease, and must not be interrupted
        await self._group.write()
        self._note_group()

    async def _wait_for_all(self, tasks: set["asyncio.Task[None]"]) -> None:
        """Wait for all samples; raise the first failure, at once if it concerns them all."""
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

    def _draw_together(self, samples: list[Sample]) -> "asyncio.Task[None] | None":
        """Start to generate all samples that are not given by one call; None: each has its own request."""
        drawn = [sample for sample in samples if not self._drawing.is_given(sample.k)]
        if not drawn or not self._drawing.is_together:
            return None
        return asyncio.create_task(
            self._drawing.draw_group(drawn, [self._prefixes[sample.k].account for sample in drawn]),
            name=f"group {self.job}",
        )

    async def _sample(self, sample: Sample, together: "asyncio.Task[None] | None") -> None:
        services, prefix = self._services, self._prefixes[sample.k]
        resumed = sum(sample.generated)
        try:
            if together is not None and not self._drawing.is_given(sample.k):
                await asyncio.shield(together)  # its requests hold slots
            else:
                async with services.slot():
                    sample = await self._drawing.draw(sample, prefix)
        finally:
            self._undrawn.discard(sample.k)
            services.room.set()
            if sample.status != SampleStatus.GIVEN:
                services.tally.generated_tokens += max(0, sum(sample.generated) - resumed)
        await prefix.settle()
        if sample.status == SampleStatus.ABORTED:
            return  # its tokens of this lease are used up
        if self._job.lane != Lane.SCORE:
            await services.sample_hooks.apply(sample)
            if sample.reward is None:
                await services.rewards.score(sample)
            else:
                services.rewards.take(sample)
            note(sample, services.config.data.eval)
            if services.frozen.scores(sample):
                await services.frozen.score(sample)
        await self._commit(sample)

    async def _commit(self, sample: Sample) -> None:
        services = self._services
        # The engine scores at temperature 1, whatever it samples at.
        drawn = self._temperature, services.engine.logprob_kind
        was_scored = sample.status == SampleStatus.GIVEN or self._job.lane == Lane.SCORE
        temperature, kind = (1.0, "scaled") if was_scored else drawn
        account = self._prefixes[sample.k].account
        write = services.commits.submit(
            self.job, self.lease.token, [sample], temperature, kind, [account], with_reward=self._group.is_wanted
        )
        self._writes[write] = sample.k
        self._note_commit(write, await asyncio.shield(write))

    def _note_commit(self, write: "asyncio.Future[Committed]", done: Committed) -> None:
        k = self._writes.pop(write)
        if done.outcome == "lost":
            raise LeaseLost(f"job {self.job}")
        sample, tally = self.samples.pop(k, None), self._services.tally
        self._missing.remove(k)
        tally.committed(sample)
        self._group.note(sample, done)
        if not self._missing and not self._group.is_due:
            self._note_group()

    def _note_group(self) -> None:
        self._services.tally.committed_groups += 1
        self._services.endings.note(self._job)

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
        """Return the token usage of the samples that are not committed."""
        return {k: self._prefixes[k].told(at_end=True) for k in self.samples}

    async def _keep_prefixes(self) -> None:
        """Write prefixes of uncommitted samples. If Redis is full, they are lost with a warning."""
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
        """Wait for commits in flight; discard those that find no room."""
        if not self._writes:
            return
        await asyncio.wait(self._writes, timeout=SETTLE_S)
        for write in list(self._writes):
            if write.done() and not write.cancelled() and write.exception() is None:
                self._note_commit(write, write.result())
            write.cancel()
        self._writes.clear()


class HeldJobs(dict[str, HeldJob]):
    """Job id -> the job, from its lease to its end. Create it in the worker's event loop, which alone changes it."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        #: Raises the unexpected error that ended a job's task; never done otherwise.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Leases that another worker had at the last renewal, while a call in flight may have ended them.
        self._doubtful: set[Lease] = set()

    @property
    def num_undrawn(self) -> int:
        """Samples that wait for a slot or are being generated."""
        return sum(held.num_undrawn for held in self.values())

    @property
    def num_open(self) -> int:
        """Samples that are not committed."""
        return sum(held.num_open for held in self.values())

    @property
    def num_suspects(self) -> int:
        """Jobs of the lane ``suspect``."""
        return sum(held.lease.lane == Lane.SUSPECT for held in self.values())

    def take(self, lease: RawLease) -> None:
        """Start to work on a leased job."""
        held = HeldJob(self._services, lease)
        before = self.get(held.job)
        if before is not None:
            # Leased again, so the earlier lease is over.
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
        """Return the leases held, as far as is known. Safe in another thread."""
        return [(job, held.lease.token) for job, held in list(self.items()) if not held.lost]

    def lose(self, gone: set[Lease]) -> None:
        """Stop jobs that another worker has leased.

        Args:
            gone: all leases that another worker had at this renewal.
        """
        for job, token in gone:
            held = self.get(job)
            # A commit in flight may have ended the lease itself: its reply says so, or the next renewal.
            if held and held.lease.token == token and (not held.is_ending or (job, token) in self._doubtful):
                held.lose()
        self._doubtful = gone

    def release(self, death: str = "") -> None:
        """Hand every job back; returns at once. ``death`` is the error that ends the worker, '' if it drains."""
        for held in list(self.values()):
            held.release(death)

    async def ended(self) -> None:
        """Wait until no job is held."""
        while tasks := [held.task for held in self.values() if held.task is not None]:
            await asyncio.wait(tasks)
