"""Release and allocate, on request, the memory of an engine that shares a GPU with the trainer.

    offload   no new requests ─> running ones return (drain: samples end) ─> idle ─> release
    onload    weights memory ─> load the newest publication into it ─> graphs and KV ─> requests

Health is not checked meanwhile. An engine that dies while memory is offloaded is restarted only when all of it is
requested back: until then the trainer uses the GPU.
"""

import asyncio
import logging
import time
from contextlib import ExitStack

from penstock.errors import EngineDied, EngineError, PublishError
from penstock.protocol.memory_control import MemoryWish, check_tags
from penstock.records.publication import Publication
from penstock.records.worker_causes import MemoryOffloaded, MemoryWanted
from penstock.workers.services import Services
from penstock.workers.weights.apply import Policy, return_all

log = logging.getLogger(__name__)

_LOOK_S = 0.05


class Memory:
    """Apply memory requests to one engine."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._hold = ExitStack()
        self._unwatched = ExitStack()
        #: The newest request.
        self.wish = MemoryWish()
        #: Set while an immediate restart of a lost engine is requested; and the requester's time of it (Unix time).
        self.revive = asyncio.Event()
        self.revived_at = 0.0
        #: Why the request cannot be met; shown in presence.
        self.cannot_offload = ""

    @property
    def wanted(self) -> set[str]:
        """Tags to be offloaded."""
        return set(self.wish.offloaded)

    def is_settled(self) -> bool:
        """Return whether the engine's memory is as requested, or cannot be."""
        return self._services.engine.offloaded == self.wanted or bool(self.cannot_offload)

    def take(self, wish: MemoryWish) -> None:
        """Record a newer request."""
        before, self.wish = self.wish, wish
        self.cannot_offload = ""
        engine = self._services.engine
        if wish.unwatched and not before.unwatched:
            self._unwatched.enter_context(engine.unwatched())
        elif not wish.unwatched:
            self._unwatched.close()
        if wish.revive_at > self.revived_at:
            self.revived_at = wish.revive_at
            self.revive.set()
        if self.wanted and not engine.info.saves_memory:
            self.cannot_offload = (
                "its engine cannot give memory back: set enable-memory-saver: true in engine.args (on a GPU)"
            )
            log.error("%s", self.cannot_offload)

    def reset(self) -> None:
        """Record that the engine was restarted, with all its memory."""
        self._hold.close()

    async def settle(self, newest: Publication | None, policy: Policy) -> None:
        """Apply the request. Blocks; raises EngineDied if the engine is lost."""
        engine, wanted = self._services.engine, self.wanted
        try:
            if release := check_tags(wanted - engine.offloaded):
                await self._release(release, policy)
            if resume := check_tags(engine.offloaded - wanted):
                await self._resume(resume, newest)
        except EngineDied:
            raise
        except EngineError as exc:
            raise EngineDied(f"the engine did not go through a change of memory: {exc}") from exc
        except PublishError as exc:
            raise EngineDied(f"the engine's weights were given up and cannot be loaded again: {exc}") from exc

    async def _release(self, tags: list[str], policy: Policy) -> None:
        services = self._services
        engine, valves = services.engine, services.valves
        async with valves.applying:
            if policy == "drain" and not engine.offloaded:
                with valves.samples.held(MemoryWanted()):
                    await valves.samples.empty()
                    self._shut()
            else:
                self._shut()
            await return_all(engine, valves)
            await self._idle()
            began = time.perf_counter()
            await engine.release_memory(tags)
            log.info("%s offloaded in %.3f s", ", ".join(tags), time.perf_counter() - began)

    def _shut(self) -> None:
        if not self._services.engine.offloaded:
            self._hold.enter_context(self._services.valves.requests.held(MemoryOffloaded(by=self.wish.by)))

    async def _idle(self) -> None:
        """Wait until the engine is idle: SGLang crashes if memory is released while requests run.

        A flush of the cache succeeds only when idle, and is harmless otherwise.
        """
        engine = self._services.engine
        deadline = time.monotonic() + engine.config.health_timeout_s * engine.config.health_failures
        while not await engine.flush_cache():
            if time.monotonic() > deadline:
                raise EngineDied("the engine does not become idle; restart it.")
            await asyncio.sleep(_LOOK_S)

    async def _resume(self, tags: list[str], newest: Publication | None) -> None:
        services = self._services
        engine = services.engine
        began = time.perf_counter()
        async with services.valves.applying:
            if "weights" in tags:
                await engine.resume_memory(["weights"])
                if newest is not None:
                    await engine.verify(newest)
                    await engine.load(newest)
            if rest := [tag for tag in tags if tag != "weights"]:
                await engine.resume_memory(rest)
            if not engine.offloaded:
                self._hold.close()
        log.info("engine memory restored: %s in %.3f s", ", ".join(tags), time.perf_counter() - began)
