"""Map a failure of a leased job to an outcome: retry, dead letter, or engine crash."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    EngineRefused,
    EnvironmentRaised,
    EnvironmentTimeout,
    FrozenModelError,
    HookError,
    MemberDied,
    PayloadError,
    ProtocolError,
    RewardError,
)
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease
from penstock.protocol.user_failures import OF_USER_CODE
from penstock.records.job import Job, JobFailure, JobState
from penstock.records.sample import Drawn
from penstock.text import trace_of, user_trace_of
from penstock.workers.services import Services

#: Longest wait before a retry; it doubles from ``worker.retry_s``.
MAX_RETRY_MS = 60_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report the failure of one leased job. The lease is over afterwards, whatever the outcome."""

    services: Services
    lease: RawLease
    #: Record of the job; None if it could not be read.
    job: Job | None
    #: Writes checkpoints of unfinished samples, so that the next worker can continue them.
    keep_prefixes: Callable[[], Awaitable[None]]
    #: Returns the token usage of the samples that are not committed, by k.
    usage: Callable[[], dict[int, Drawn]]

    async def send(self, failure: Exception) -> None:
        """Report ``failure`` to Redis. Blocks for commits in flight and two round trips.

        Raises:
            LeaseLost: another worker has leased the job in the meantime.
        """
        user_trace = user_trace_of(failure)
        match failure:
            case EngineDied() if self.services.died_receiving and not isinstance(failure, MemberDied):
                await self._release(str(failure))
            case EngineDied():
                services = self.services
                died = services.present() if isinstance(failure, MemberDied) else services.died
                await self._crash(str(failure), *died)
            case ConfigError() | ProtocolError() | EngineRefused():
                await self._fail(failure, JobFailure.REFUSED, str(failure), permanent=True)
            case RewardError() | HookError():
                await self._fail(failure, failure.outcome, user_trace)
            case FrozenModelError():
                await self._fail(failure, JobFailure.MODEL_FAILED, str(failure))
            case EngineError():
                await self._fail(failure, JobFailure.ENGINE_ERROR, str(failure))
            case EnvironmentRaised():
                await self._fail(failure, JobFailure.ENVIRONMENT_RAISED, user_trace)
            case EnvironmentTimeout():
                await self._fail(failure, JobFailure.ENVIRONMENT_TIMEOUT, str(failure))
            case PayloadError():
                await self._fail(failure, JobFailure.PAYLOAD_ERROR, str(failure))
            case _:
                # A bug in penstock: store the traceback in the dead letter.
                await self._fail(failure, JobFailure.RAISED, trace_of(failure))

    async def _fail(self, failure: Exception, reason: str, detail: str, *, permanent: bool = False) -> None:
        services, config, job = self.services, self.services.config.worker, self.lease.job
        services.tally.failures[reason] += 1
        # A prefix of inconsistent arrays cannot be continued.
        if not permanent and reason != JobFailure.PAYLOAD_ERROR:
            await self.keep_prefixes()
        state = await services.control.call(
            scripts.fail(
                services.keys,
                job,
                self.lease.token,
                services.worker,
                reason=reason,
                detail=detail,
                max_attempts=0 if permanent else config.max_attempts,
                retry_ms=int(config.retry_s * 1000),
                max_retry_ms=MAX_RETRY_MS,
                usage=self.usage(),
            )
        )
        last = (detail.strip().splitlines() or [""])[-1]
        if state == JobState.DEAD and self.job is not None:
            services.outcomes.add(self.job, reason, last)
            await services.send_outcomes()
        message = f"job {job} failed ({reason}), new state {state}: {last[:1000]}"
        if reason in OF_USER_CODE or reason == JobFailure.RAISED:
            services.repeats.warn(failure, message, f"{reason} {state}")
        else:
            log.warning("%s", message)

    async def _release(self, detail: str) -> None:
        """Hand the job back without charging an attempt: the engine was lost while it received weights."""
        await self.keep_prefixes()
        services, job = self.services, self.lease.job
        await services.control.call(scripts.release(services.keys, job, self.lease.token, self.usage()))
        services.tally.handed_back += 1
        log.warning("engine lost while receiving weights; job %s handed back: %s", job, detail)

    async def _crash(self, detail: str, publication: str, engine: str, sure: bool) -> None:
        await self.keep_prefixes()
        services, job = self.services, self.lease.job
        call = scripts.crash(
            services.keys,
            job,
            self.lease.token,
            services.worker,
            detail,
            model=services.config.model.name,
            publication=publication,
            engine=engine,
            sure=sure,
            usage=self.usage(),
        )
        state = await services.control.call(call)
        services.tally.crashes[state] += 1
        log.warning("engine died while running job %s, new state %s", job, state)


def failure_of(task: "asyncio.Task[None]") -> Exception | None:
    """Return the exception of a finished sample task; None if it succeeded. Raises errors that must end the worker."""
    if task.cancelled():
        return RuntimeError(f"{task.get_name()} was cancelled.")
    failure = task.exception()
    if isinstance(failure, Exception) or failure is None:
        return failure
    raise failure
