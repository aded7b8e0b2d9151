"""Starts the worker's engine, and brings it back whenever it is lost.

lost ─> at once ─> after 1, 2, 4 ... s ─> crash loop: every 30 s, jobs handed back, none leased, the reason published
  │          each time weights, then a token that belongs to no sample, then jobs
  └ an external engine that does not answer: away, asked every few seconds, never counted as a failure

Whatever the way, weights come before work (I9): the newest publication is loaded before the valves open.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from penstock.errors import EngineError
from penstock.names import Lane
from penstock.protocol.records.causes import EngineAway, EngineCrashLoop, EngineRestarting
from penstock.protocol.waits import Waiting
from penstock.workers.health import Restarts, shorten
from penstock.workers.jobs.held_job import HeldJob
from penstock.workers.services import Services
from penstock.workers.weights.updates import Updates

log = logging.getLogger(__name__)

#: An engine that lived so long, or finished anything, has settled.
SETTLED_S = 60.0
#: Tokens that an engine draws for nobody before it takes a suspect.
PROOF_TOKENS = 32
#: Longest first token of an engine that was lost before.
PROOF_S = 60.0
#: Between two looks at how far a start is.
PHASE_S = 1.0


class Caretaker:
    """Of one engine. ``first_start`` once, then ``run`` for ever.

    Args:
        held: jobs of this worker, by name.
    """

    def __init__(self, services: Services, updates: Updates, waiting: Waiting, held: Mapping[str, HeldJob]) -> None:
        self._services = services
        self._updates = updates
        self._waiting = waiting
        self._held = held
        self._restarts = Restarts(services.config.engine)
        updates.let_go = self._let_go

    async def first_start(self) -> None:
        """Start the engine with the current weights. Blocks until it serves; failures are tried again as later ones.

        Raises:
            ConfigError: its configuration cannot work.
        """
        telling = asyncio.create_task(self._tell_phases(), name="phases")
        try:
            await self._start()
        except EngineError as exc:
            log.error("the engine did not start: %s", exc)
            self._restarts.note_failure()
            self._services.lose_engine(self._services.births)
            telling.cancel()
            await self._bring_back(str(exc))
            self._services.regain_engine()
        finally:
            telling.cancel()
        self._waiting.end()

    async def _tell_phases(self) -> None:
        """Name the wait for the first start, and how far that is, until it is cancelled."""
        while True:
            phase = await asyncio.to_thread(self._services.engine.phase)
            self._waiting.blocked_on(phase)
            await asyncio.sleep(PHASE_S)

    async def run(self) -> None:
        """Bring the engine back whenever it is lost, for ever."""
        services = self._services
        while True:
            born, progress = time.monotonic(), services.tally.progress
            reason = await self._death()
            if time.monotonic() - born >= SETTLED_S or services.tally.progress > progress:
                self._restarts.note_settled()
            self._restarts.note_failure()
            log.error("engine lost: %s", reason)
            services.tally.engine_restarts += 1
            services.lose_engine(services.births, reason)
            had = services.engine.version
            await self._bring_back(reason)
            await self._give_back_newer(had)
            services.regain_engine()

    async def _start(self) -> None:
        services, engine = self._services, self._services.engine
        await self._updates.start_engine()
        services.births += 1
        log.info("SGLang %s at %s, version %d", engine.info.version, engine.url, engine.version)
        most = services.config.rollout.max_context_tokens
        if engine.info.max_context < most and services.births == 1:
            log.warning("answers end at %d tokens, the engine's context; rollout.max_context_tokens is %d",
                        engine.info.max_context, most)  # fmt: skip

    async def _death(self) -> str:
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

    async def _bring_back(self, reason: str) -> None:
        """Start it until it serves."""
        services, away_since = self._services, time.monotonic()
        while True:
            self._judge(reason)
            await self._wait(reason)
            try:
                await self._start_again()
            except EngineError as exc:
                if str(exc) != reason:
                    log.error("the engine did not start, trying again: %s", exc)
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
        # A change of weights that was under way fails now, and must not touch the next engine.
        async with services.valves.applying:
            await engine.stop()
            await self._start()
            # Jobs are charged with the death of an engine: one that dies of everything must not take any.
            await engine.prove(PROOF_S)

    def _judge(self, reason: str) -> None:
        """Publish a crash loop, and let other workers have what is held."""
        services = self._services
        if self._restarts.is_loop and not services.crash_loop:
            log.error("the engine is in a crash loop: it %s", self._restarts.said())
            self._hand_back()
        services.crash_loop = shorten(reason) if self._restarts.is_loop else ""

    async def _wait(self, reason: str) -> None:
        """Back off before a start, by name."""
        config, wait_s = self._services.config.engine, self._restarts.wait_s
        lines = shorten(reason).splitlines()
        # The line that names an error says more than what a dying process writes after it.
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        last = " ... ".join(dict.fromkeys((lines[0], said))) if lines else ""
        if self._services.engine.is_away:
            wait_s = max(wait_s, config.health_interval_s)
            self._waiting.blocked_on(EngineAway(config.url or self._services.engine.url, last))
        elif self._services.crash_loop:
            self._waiting.blocked_on(EngineCrashLoop(last, self._restarts.count, config.crash_loop_window_s, wait_s))
        else:
            self._waiting.blocked_on(EngineRestarting(last))
        await self._updates.pause(wait_s)

    async def make_sure(self) -> bool:
        """Before an engine that has finished nothing takes a suspect, where there is nothing else to take.

        On a publication on which engines have finished jobs it first draws tokens that belong to no sample; where none
        has, a death is charged to the publication. False where there is no suspect, or the engine was lost. Blocks for
        the tokens.
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
            await services.note_finished(birth, "")
        return birth == services.births and not services.engine_lost.is_set()

    async def _let_go(self) -> None:
        """Hand everything back, without a charge; blocks until that is done."""
        self._hand_back()
        if tasks := [held.task for held in self._held.values() if held.task is not None]:
            await asyncio.wait(tasks)

    def _hand_back(self) -> None:
        """Let other workers have what waits for this engine, without a charge."""
        for held in list(self._held.values()):
            held.release()

    async def _give_back_newer(self, had: int) -> None:
        """T12: where the engine came back with older weights, or none, jobs of a newer version are handed back.

        Args:
            had: version that it had. What was begun on that is not gone on with by older weights.
        """
        version = self._services.highest
        is_older = self._services.engine.version < had
        newer = [held for held in self._held.values() if is_older or version < max(0, held.lease.not_before)]
        for held in newer:
            held.release()
        if tasks := [held.task for held in newer if held.task is not None]:
            await asyncio.wait(tasks)
