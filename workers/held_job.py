"""One leased job from its lease to its end: generate, reward, commit; or fail, crash, release.

lease ─> n samples: slot ─> generate ─> reward ─> commit     (each k by itself, commits coalesced)
           │ engine died: prefixes kept, charged, queued anew (crash)
           │ reward has no number, answer is garbage: tried again later, then buried (fail)
           │ can never work: buried at once with its reason (fail, 0 tries)
           └ lease lost: everything stops, nothing is written (I3)
"""

import asyncio
import logging
import traceback
from dataclasses import replace

from penstock import scripts
from penstock.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    LeaseLost,
    PayloadError,
    PenstockError,
    ProtocolError,
    RewardError,
)
from penstock.messages import Job, Sample
from penstock.scripts import RawLease
from workers.generate import generate_sample, sampling_for
from workers.partial import partial_from_bytes, partial_to_bytes
from workers.services import Services

log = logging.getLogger(__name__)

#: Prefixes of unfinished samples are kept so long.
PARTIAL_TTL_S = 7 * 86400


class HeldJob:
    """A job that this worker holds. ``run`` ends when the job is no longer ours."""

    def __init__(self, services: Services, lease: RawLease) -> None:
        self._services = services
        self.lease = lease
        self._job: Job | None = None
        self._samples: dict[int, Sample] = {}
        self._finished: list[Sample] = []
        self._committing = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        #: True once the lease is known to be another's.
        self.lost = False
        self._releasing = False

    @property
    def job(self) -> str:
        return self.lease.job

    @property
    def is_committing(self) -> bool:
        """True while samples are being written: the last of them ends the lease."""
        return self._committing.locked()

    def start(self) -> "asyncio.Task[None]":
        """Run as a task of its own."""
        self.task = asyncio.create_task(self.run(), name=f"job {self.job}")
        return self.task

    def lose(self) -> None:
        """The lease is another's: stop at once and write nothing."""
        self.lost = True
        if self.task is not None:
            self.task.cancel()

    def release(self) -> None:
        """Hand the job back with what was drawn so far."""
        self._releasing = True
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Work until the job is committed, failed, crashed, released or lost."""
        try:
            await self._work()
        except asyncio.CancelledError:
            if self._releasing and not self.lost:
                await asyncio.shield(self._hand_back())
        except LeaseLost:
            self.lost = True
        except EngineDied as exc:
            self._services.engine_lost.set()
            await self._crash(str(exc))
        except RewardError as exc:
            await self._fail(exc.outcome, str(exc))
        except EngineError as exc:
            await self._fail("engine_error", str(exc))
        except PayloadError as exc:
            await self._fail("payload_error", str(exc))
        except (ConfigError, ProtocolError) as exc:
            await self._fail("refused", str(exc), permanent=True)
        except Exception:
            # A user's environment or a defect of ours: the job keeps the traceback, the worker goes on.
            await self._fail("raised", traceback.format_exc())
        if self.lost:
            self._services.tally.lost_leases += 1
            log.warning("lost the lease of job %s; nothing of it was written", self.job)

    async def _work(self) -> None:
        job = Job.from_bytes(self.lease.body, f"record of job {self.job}")
        self._job = job = replace(job, not_before=self.lease.not_before)
        missing = [k for k in range(job.n) if k not in self.lease.committed]
        sampling_for(job, self._services.config.rollout)  # refused before anything is drawn
        tasks = [asyncio.create_task(self._sample(job, k), name=f"sample {job.id}/{k}") for k in missing]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Cancelled samples collect what the engine has drawn for them.
            await asyncio.gather(*tasks, return_exceptions=True)
        self._services.tally.committed_groups += 1

    async def _sample(self, job: Job, k: int) -> None:
        services = self._services
        sample = await self._resume(job, k)
        self._samples[k] = sample
        services.num_generating += 1
        try:
            async with services.slots:
                await generate_sample(
                    services.engine,
                    services.gate,
                    job,
                    k,
                    tokenizer=services.tokenizer,
                    rollout=services.config.rollout,
                    partial=sample,
                )
        finally:
            services.num_generating -= 1
        services.tally.generated_tokens += sum(sample.generated)
        await services.rewards.score(sample)
        self._finished.append(sample)
        await self._commit(job)

    async def _resume(self, job: Job, k: int) -> Sample:
        if self.lease.lane not in ("resume", "suspect"):
            return Sample(job, k)
        key = self._services.keys.partial(f"{job.id}/{k}")
        data = await self._services.control.do(lambda client: client.get(key))
        if data is None:
            return Sample(job, k)
        try:
            return partial_from_bytes(data, job, k)
        except PenstockError as exc:
            log.warning("the prefix of sample %s/%d cannot be used, it starts anew: %s", job.id, k, exc)
            return Sample(job, k)

    async def _commit(self, job: Job) -> None:
        """Commit what is finished; samples that finish meanwhile go along with the next one."""
        async with self._committing:
            ready, self._finished = self._finished, []
            if not ready:
                return
            temperature = float(sampling_for(job, self._services.config.rollout).get("temperature", 1.0))
            kind = self._services.engine.logprob_kind
            done = await asyncio.shield(
                self._services.commits.commit(job.id, self.lease.token, ready, temperature, kind)
            )
        if done.outcome == "lost":
            raise LeaseLost(f"job {job.id}")
        for sample in ready:
            self._samples.pop(sample.k, None)
        self._services.tally.committed_samples += done.new

    async def _fail(self, reason: str, detail: str, *, permanent: bool = False) -> None:
        config = self._services.config.worker
        self._services.tally.failed_jobs += 1
        went = await self._services.control.call(
            scripts.fail(
                self._services.keys,
                self.job,
                self.lease.token,
                self._services.worker,
                reason=reason,
                detail=detail,
                max_attempts=0 if permanent else config.max_attempts,
                retry_ms=int(config.retry_s * 1000),
            )
        )
        log.warning("job %s failed as %s and is %s now: %s", self.job, reason, went, detail.strip().splitlines()[-1])

    async def _crash(self, detail: str) -> None:
        await self._keep_prefixes()
        services = self._services
        call = scripts.crash(services.keys, self.job, self.lease.token, services.worker, detail)
        went = await services.control.call(call)
        log.warning("the engine died under job %s, which is %s now", self.job, went)

    async def _hand_back(self) -> None:
        await self._keep_prefixes()
        services = self._services
        await services.control.call(scripts.release(services.keys, self.job, self.lease.token))

    async def _keep_prefixes(self) -> None:
        services = self._services
        for k, sample in self._samples.items():
            if any(sample.generated):
                record = partial_to_bytes(sample)
                call = scripts.checkpoint(services.keys, self.job, self.lease.token, k, record, PARTIAL_TTL_S)
                await services.control.call(call)
