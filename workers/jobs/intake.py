"""Lease as many jobs as a worker's slots, its engine and the lanes allow; otherwise sleep.

An entry in the list ``wake``, a free slot, and loaded weights end the sleep.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import QueueFull
from penstock.names import LANES, new_token
from penstock.protocol import scripts
from penstock.protocol.waits import Waiting
from penstock.records.cause import Cause
from penstock.records.causes import NoPublication
from penstock.records.worker_causes import EngineRestarting, NoJobs
from penstock.redis.control import AsyncControl
from penstock.workers.jobs.held_job import HeldJobs
from penstock.workers.services import Services

log = logging.getLogger(__name__)

#: Longest sleep on the list of wake-ups: a wake-up that another worker consumed costs at limit this.
WAKE_S = 1.0

#: Longest sleep between checks of slots and engine.
ROOM_CHECK_S = 0.1

#: Most uncommitted samples (waiting for rewards, or for a full Redis), as a multiple of the slots.
MAX_OPEN = 4


class Intake:
    """Lease jobs for one worker until it drains.

    Args:
        held: receives the leased jobs.
        waker: a separate connection, because reading ``wake`` blocks it.
        draining: stops leasing once set.
        verify_before_suspect: ``EngineSupervisor.verify_before_suspect``, called before a suspect job is leased.
    """

    def __init__(
        self,
        services: Services,
        held: HeldJobs,
        *,
        waker: AsyncControl,
        waiting: Waiting,
        draining: asyncio.Event,
        verify_before_suspect: Callable[[], Awaitable[bool]],
    ) -> None:
        self._services = services
        self._held = held
        self._waker = waker
        self._waiting = waiting
        self._draining = draining
        self._verify_before_suspect = verify_before_suspect
        self._leasing = asyncio.Lock()

    async def run(self) -> None:
        """Lease jobs until the worker drains; sleep on ``wake`` while the lanes are empty."""
        services, waiting = self._services, self._waiting
        control = services.control
        losses = control.losses
        stop = asyncio.create_task(self._draining.wait())
        while not self._draining.is_set():
            if losses != control.losses:
                losses = control.losses
                await self.sweep_own()
            # Clear before leasing: weights may change during the call.
            services.may_start_more.clear()
            try:
                num_leased = await self._lease()
            except QueueFull as exc:
                waiting.blocked_on(exc.cause)
                await asyncio.wait({stop}, timeout=WAKE_S)
                continue
            if num_leased:
                waiting.end()
                continue
            waiting.blocked_on(self._why_idle())
            await self._sleep(stop)
        waiting.end()

    async def settled(self) -> None:
        """Wait until a lease call in flight has returned."""
        async with self._leasing:
            pass

    async def sweep_own(self, death: str = "") -> None:
        """Hand back leases without a running job: the reply was lost, or the job's task ended the worker.

        Args:
            death: error that ends the worker; '' without one.
        """
        services = self._services
        why = f"the worker failed: {death}" if death else "the reply to the lease call was lost"
        async with self._leasing:
            known = [job for job, held in self._held.items() if not held.lost]
            for lane in LANES:
                call = scripts.abandon(services.keys, lane, services.worker, known, death=death)
                for job in await services.control.call(call):
                    log.warning("job %s handed back: %s", job, why)

    async def _sleep(self, stop: "asyncio.Task[Any]") -> None:
        services = self._services
        services.room.clear()
        if self._has_room():
            wakeup: asyncio.Task[object] = asyncio.create_task(
                self._waker.do(lambda client: client.blpop([services.keys.wake], timeout=WAKE_S)), name="wake"
            )
        else:
            wakeup = asyncio.create_task(services.room.wait(), name="room")
        more = asyncio.create_task(services.may_start_more.wait(), name="may start more")
        # blpop has its own timeout; cancelling it would close the connection.
        timeout = None if wakeup.get_name() == "wake" else ROOM_CHECK_S
        await asyncio.wait({wakeup, more, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        wakeup.cancel()
        more.cancel()
        # Await both, so that an unexpected error ends the process.
        await asyncio.wait({wakeup, more})
        if not wakeup.cancelled():
            wakeup.result()

    def _has_room(self) -> bool:
        services, slots = self._services, self._services.config.worker.slots
        return (
            self._held.num_ungenerated < slots
            and self._held.num_open < MAX_OPEN * slots
            and services.engine.version >= 0
            and not services.engine_lost.is_set()
            and not services.engine.offloaded
        )

    def _why_idle(self) -> Cause | None:
        services, engine = self._services, self._services.engine
        if services.engine_lost.is_set():
            return EngineRestarting(services.crash_loop)
        if engine.version < 0:
            return NoPublication(services.config.model.name)
        if services.valves.cause:
            return services.valves.cause
        return None if self._held else NoJobs(engine.version)

    async def _lease(self) -> int:
        services, held = self._services, self._held
        async with self._leasing:
            if self._draining.is_set() or not self._has_room():
                return 0
            suspects = held.num_suspects
            limit = max(1, (services.config.worker.slots - held.num_ungenerated) // services.config.rollout.n)
            # Until the engine has finished a request, a crash could not be blamed on a suspect: run other jobs first.
            leases = await self._lease_up_to(limit, max(0, 1 - suspects) if services.is_sure else 0)
            if not leases and not held and not services.is_sure and await self._verify_before_suspect():
                leases = await self._lease_up_to(limit, 1)
            for lease in leases:
                held.take(lease)
            return len(leases)

    async def _lease_up_to(self, limit: int, suspects: int) -> list[scripts.RawLease]:
        services = self._services
        call = scripts.lease(
            services.keys,
            services.worker,
            new_token(),
            most=limit,
            version=services.engine.version,
            suspects=suspects,
            highest=services.highest,
        )
        return await services.control.call(call)
