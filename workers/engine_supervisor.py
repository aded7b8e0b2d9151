"""Start the worker's engine and restart it whenever it is lost.

lost ─> at once ─> after 1, 2, 4 ... s ─> crash loop: every 30 s, jobs handed back, no leases, reason published
│          each restart loads weights, generates a test token, then takes jobs
└ external engine that does not respond: away, retried every few seconds, never counted as a failure

Every restart loads the newest publication before the valves open (I9).
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from penstock.errors import EngineError
from penstock.names import Lane
from penstock.protocol.waits import Waiting
from penstock.records.worker_causes import EngineAway, EngineCrashLoop, EngineRestarting
from penstock.system.restarts import Restarts
from penstock.text import shorten_reason
from penstock.workers.jobs.held_job import HeldJob
from penstock.workers.services import Services
from penstock.workers.weights.loop import WeightLoop

log = logging.getLogger(__name__)

#: Uptime in seconds after which an engine counts as stable, even if it has finished no work.
SETTLED_S = 60.0
#: Test tokens that an engine generates before it takes a suspect job.
PROOF_TOKENS = 32
#: Time limit in seconds for the test tokens of an engine after a restart.
PROOF_S = 60.0
#: Seconds between checks of the start phase.
PHASE_S = 1.0
#: Window in seconds in which ``engine.crash_loop_failures`` failures are a crash loop.
CRASH_LOOP_S = 600.0
#: Longest wait before a restart, in units of ``engine.restart_wait_s``.
LONGEST_WAIT = 30


class EngineSupervisor:
    """Supervise one engine: call ``first_start`` once, then ``run``.

    Args:
        held: jobs of this worker by id.
    """

    def __init__(self, services: Services, updates: WeightLoop, waiting: Waiting, held: Mapping[str, HeldJob]) -> None:
        self._services = services
        self._updates = updates
        self._waiting = waiting
        self._held = held
        config = services.config.engine
        self._restarts = Restarts(
            config.restart_wait_s, LONGEST_WAIT * config.restart_wait_s, CRASH_LOOP_S, config.crash_loop_failures
        )

    async def first_start(self) -> None:
        """Start the engine with the current weights. Blocks until it serves; failures are retried like crashes.

        Raises:
            ConfigError: the configuration is invalid.
        """
        reporting = asyncio.create_task(self._report_phases(), name="phases")
        try:
            await self._start()
        except EngineError as exc:
            log.error("engine failed to start: %s", exc)
            self._restarts.note_failure()
            self._services.lose_engine(self._services.births)
            reporting.cancel()
            await self._restart(str(exc))
            self._services.regain_engine()
        finally:
            reporting.cancel()
        self._waiting.end()

    async def _report_phases(self) -> None:
        """Report the phase of the first start until cancelled."""
        while True:
            phase = await asyncio.to_thread(self._services.engine.phase)
            self._waiting.blocked_on(phase)
            await asyncio.sleep(PHASE_S)

    async def run(self) -> None:
        """Restart the engine whenever it is lost; never returns."""
        services = self._services
        while True:
            born, progress = time.monotonic(), services.tally.progress
            reason = await self._wait_until_lost()
            if time.monotonic() - born >= SETTLED_S or services.tally.progress > progress:
                self._restarts.note_settled()
            self._restarts.note_failure()
            log.error("engine lost: %s", reason)
            services.tally.engine_restarts += 1
            services.lose_engine(services.births, reason)
            if services.hands_back:
                await self._hand_back_all()
            last_version = services.engine.version
            await self._restart(reason)
            await self._hand_back_newer(last_version)
            services.regain_engine()

    async def _start(self) -> None:
        services, engine = self._services, self._services.engine
        await self._updates.start_engine()
        services.births += 1
        log.info("SGLang %s at %s, version %d", engine.info.version, engine.url, engine.version)
        most = services.config.rollout.max_context_tokens
        if engine.info.max_context < most and services.births == 1:
            log.warning("sequences are limited to the engine's context of %d tokens; rollout.max_context_tokens is %d",
                        engine.info.max_context, most)  # fmt: skip

    async def _wait_until_lost(self) -> str:
        engine = self._services.engine
        watch = asyncio.create_task(engine.watch())
        seen = asyncio.create_task(self._services.engine_lost.wait())
        try:
            done, _ = await asyncio.wait({watch, seen}, return_when=asyncio.FIRST_COMPLETED)
            return watch.result() if watch in done else engine.last_words() or self._services.loss
        finally:
            for task in (watch, seen):
                task.cancel()
            await asyncio.gather(watch, seen, return_exceptions=True)

    async def _restart(self, reason: str) -> None:
        """Retry starting the engine until it serves."""
        services, away_since = self._services, time.monotonic()
        while True:
            self._check_crash_loop(reason)
            await self._wait(reason)
            try:
                await self._start_again()
            except EngineError as exc:
                if str(exc) != reason:
                    log.error("engine failed to start, retrying: %s", exc)
                reason = str(exc)
                if not services.engine.is_away:
                    self._restarts.note_failure()
                elif time.monotonic() - away_since > services.config.worker.lease_s:
                    self._hand_back()
                continue
            services.crash_loop = ""
            self._waiting.end()
            return

    async def _start_again(self) -> None:
        services, engine = self._services, self._services.engine
        await engine.stop()
        # A weight update in progress fails now and must not reach the next engine.
        async with services.valves.applying:
            await engine.stop()
            await self._start()
            # An engine death is charged to its jobs, so a broken engine must not take any.
            await engine.prove(PROOF_S)

    def _check_crash_loop(self, reason: str) -> None:
        """Detect and publish a crash loop, and hand jobs back for other workers."""
        services = self._services
        if self._restarts.is_loop and not services.crash_loop:
            log.error(
                "engine is in a crash loop: it failed %d times in %g s", self._restarts.count, self._restarts.window_s
            )
            self._hand_back()
        services.crash_loop = shorten_reason(reason) if self._restarts.is_loop else ""

    async def _wait(self, reason: str) -> None:
        """Back off before a start and report the wait."""
        config, wait_s = self._services.config.engine, self._restarts.wait_s
        lines = shorten_reason(reason).splitlines()
        # The last line with an error is more useful than output that follows it.
        error_line = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        last = " ... ".join(dict.fromkeys((lines[0], error_line))) if lines else ""
        if self._services.engine.is_away:
            wait_s = max(wait_s, config.health_interval_s)
            self._waiting.blocked_on(EngineAway(config.url or self._services.engine.url, last))
        elif self._services.crash_loop:
            self._waiting.blocked_on(EngineCrashLoop(last, self._restarts.count, CRASH_LOOP_S, wait_s))
        else:
            self._waiting.blocked_on(EngineRestarting(last))
        await self._updates.pause(wait_s)

    async def verify_before_suspect(self) -> bool:
        """Verify an engine that has not finished a request yet before it takes a suspect job; return whether it may.

        If no engine has finished a job on its publication, a crash is charged to the publication; otherwise the engine
        first generates test tokens. Return False if no suspect waits, or if the engine was lost. Blocks for the tokens.
        """
        services = self._services
        keys, birth = services.keys, services.births
        if not await services.control.do(lambda client: client.xlen(keys.jobs(Lane.SUSPECT))):
            return False
        ok, trials = f"ok:{services.publication}", keys.trials(services.config.model.name)
        if await services.control.do(lambda client: client.hexists(trials, ok)):
            try:
                await services.engine.prove(PROOF_S, num_tokens=PROOF_TOKENS)
            except EngineError as exc:
                services.lose_engine(birth, str(exc))
                return False
            await services.record_finished(birth, "")
        return birth == services.births and not services.engine_lost.is_set()

    async def _hand_back_all(self) -> None:
        """Hand back all jobs without a charge; blocks until done."""
        self._hand_back()
        if tasks := [held.task for held in self._held.values() if held.task is not None]:
            await asyncio.wait(tasks)

    def _hand_back(self) -> None:
        """Hand back all jobs without a charge; returns at once."""
        for held in list(self._held.values()):
            held.release()

    async def _hand_back_newer(self, last_version: int) -> None:
        """Hand back jobs of newer versions if the engine restarted with older weights or none (T12).

        Args:
            last_version: version before the crash; older weights must not continue its samples.
        """
        version = self._services.highest
        is_older = self._services.engine.version < last_version
        newer = [held for held in self._held.values() if is_older or version < max(0, held.lease.not_before)]
        for held in newer:
            held.release()
        if tasks := [held.task for held in newer if held.task is not None]:
            await asyncio.wait(tasks)
