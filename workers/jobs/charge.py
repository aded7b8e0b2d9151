"""What a job that failed here is charged with: a try (fail), its burial (refused), or a death of the engine (crash)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

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
from penstock.protocol.records.drawn import Drawn
from penstock.protocol.records.job import Job, JobFailure, JobState
from penstock.protocol.scripts import RawLease
from penstock.protocol.user_failures import OF_USER_CODE
from penstock.words import trace_of, user_trace_of
from penstock.workers.services import Services

log = logging.getLogger(__name__)


class Charge:
    """Of one leased job. Whatever it is charged with, the lease is over afterwards.

    Args:
        job: its record; None where it could not be read.
        keep_prefixes: keeps what was drawn for whoever has the job next.
        told: what there is to tell of its samples that are not committed, by k.
    """

    def __init__(
        self,
        services: Services,
        lease: RawLease,
        job: Job | None,
        keep_prefixes: Callable[[], Awaitable[None]],
        told: Callable[[], dict[int, Drawn]],
    ) -> None:
        self._services = services
        self._lease = lease
        self._job = job
        self._keep_prefixes = keep_prefixes
        self._told = told

    async def make(self, failure: Exception) -> None:
        """Charge the job with what ended it. Blocks for the commits on their way and two round trips.

        Raises:
            LeaseLost: the job was another's by then.
        """
        of_user = user_trace_of(failure)
        match failure:
            case EngineDied() if self._services.died_receiving and not isinstance(failure, MemberDied):
                await self._release(str(failure))
            case EngineDied():
                services = self._services
                died = services.present() if isinstance(failure, MemberDied) else services.died
                await self._crash(str(failure), *died)
            case ConfigError() | ProtocolError() | EngineRefused():
                await self._fail(failure, JobFailure.REFUSED, str(failure), permanent=True)
            case RewardError() | HookError():
                await self._fail(failure, failure.outcome, of_user)
            case FrozenModelError():
                await self._fail(failure, JobFailure.MODEL_FAILED, str(failure))
            case EngineError():
                await self._fail(failure, JobFailure.ENGINE_ERROR, str(failure))
            case EnvironmentRaised():
                await self._fail(failure, JobFailure.ENVIRONMENT_RAISED, of_user)
            case EnvironmentTimeout():
                await self._fail(failure, JobFailure.ENVIRONMENT_TIMEOUT, str(failure))
            case PayloadError():
                await self._fail(failure, JobFailure.PAYLOAD_ERROR, str(failure))
            case _:
                # A defect of penstock: the job keeps the traceback.
                await self._fail(failure, JobFailure.RAISED, trace_of(failure))

    async def _fail(self, failure: Exception, reason: str, detail: str, *, permanent: bool = False) -> None:
        services, config, job = self._services, self._services.config.worker, self._lease.job
        services.tally.failures[reason] += 1
        # Arrays that contradict each other are not continued from.
        if not permanent and reason != JobFailure.PAYLOAD_ERROR:
            await self._keep_prefixes()
        went = await services.control.call(
            scripts.fail(
                services.keys,
                job,
                self._lease.token,
                services.worker,
                reason=reason,
                detail=detail,
                max_attempts=0 if permanent else config.max_attempts,
                retry_ms=int(config.retry_s * 1000),
                max_retry_ms=int(config.max_retry_s * 1000),
                told=self._told(),
            )
        )
        last = (detail.strip().splitlines() or [""])[-1]
        if went == JobState.DEAD and self._job is not None:
            services.endings.note(self._job, reason, last)
            await services.tell_endings()
        message = f"job {job} failed as {reason} and is {went} now: {last[:1000]}"
        if reason in OF_USER_CODE or reason == JobFailure.RAISED:
            services.repeats.warn(failure, message, f"{reason} {went}")
        else:
            log.warning("%s", message)

    async def _release(self, detail: str) -> None:
        """The engine was lost over a transfer of weights: whoever has the job next goes on, without a charge."""
        await self._keep_prefixes()
        services, job = self._services, self._lease.job
        await services.control.call(scripts.release(services.keys, job, self._lease.token, self._told()))
        services.tally.handed_back += 1
        log.warning("the engine was lost while weights were sent to it; job %s is handed back: %s", job, detail)

    async def _crash(self, detail: str, publication: str, engine: str, sure: bool) -> None:
        await self._keep_prefixes()
        services, job = self._services, self._lease.job
        call = scripts.crash(
            services.keys,
            job,
            self._lease.token,
            services.worker,
            detail,
            model=services.config.model.name,
            publication=publication,
            engine=engine,
            sure=sure,
            told=self._told(),
        )
        went = await services.control.call(call)
        services.tally.crashes[went] += 1
        log.warning("the engine died under job %s, which is %s now", job, went)


def failure_of(task: "asyncio.Task[None]") -> Exception | None:
    """What ended a task of a job's sample; None where it came to its end. Raises what ends the worker."""
    if task.cancelled():
        return RuntimeError(f"{task.get_name()} was cancelled.")
    failure = task.exception()
    if isinstance(failure, Exception) or failure is None:
        return failure
    raise failure
