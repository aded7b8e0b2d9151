"""The weights task: follow the publications of a model and apply the newest by the run's policy."""

import asyncio
import logging

from penstock.control import AsyncControl
from penstock.errors import EngineError, PublishError
from penstock.messages import Publication
from penstock.waits import Waiting
from workers.apply import ApplyReport, Policy, apply_publication
from workers.services import Services

log = logging.getLogger(__name__)

#: Longest blocking read of the stream.
BLOCK_MS = 1000
#: How often a cohort that still runs is looked at, and a publication that cannot be loaded is tried again.
LOOK_S, RETRY_S = 0.05, 1.0


class Updates:
    """Knows the newest publication and brings the engine to it.

    Args:
        reader: a connection of its own for blocking reads.
    """

    def __init__(self, services: Services, reader: AsyncControl, waiting: Waiting) -> None:
        self._services = services
        self._reader = reader
        self._waiting = waiting
        self._key = services.keys.weights(services.config.model.name)
        self._last = "0-0"
        #: Newest publication that was announced.
        self.newest: Publication | None = None
        #: Why the newest cannot be loaded; shown in presence.
        self.cannot_load = ""

    @property
    def policy(self) -> Policy:
        """one_step always drains: its batches are of one version each (T5)."""
        config = self._services.config
        return "drain" if config.staleness.mode == "one_step" else config.worker.apply

    async def look(self) -> Publication | None:
        """Read the newest publication, without blocking on the stream."""
        newest = await self._reader.do(lambda client: client.xrevrange(self._key, count=1))
        self._take(newest)
        return self.newest

    async def run(self) -> None:
        """Follow the stream for ever; an engine that dies of an update is left to the engine task."""
        while True:
            await self._follow()
            await self.catch_up()

    async def _follow(self) -> None:
        newest = self.newest
        if newest is not None and self._is_behind(newest):
            return
        found = await self._reader.do(lambda client: client.xread({self._key: self._last}, block=BLOCK_MS))
        if found:
            self._take(found[0][1][-1:])

    def _take(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if entries:
            entry, fields = entries[0]
            self._last = entry.decode()
            self.newest = Publication.from_bytes(fields[b"p"], f"publication {self._last}")

    def _is_behind(self, newest: Publication) -> bool:
        engine = self._services.engine
        return (engine.version, engine.rev) < (newest.version, newest.rev)

    async def catch_up(self) -> None:
        """Bring the engine to the newest publication."""
        while (newest := self.newest) is not None and self._is_behind(newest):
            if self._services.engine_lost.is_set():
                await asyncio.sleep(LOOK_S)  # the engine task starts it with the newest one
                continue
            try:
                await self._cohort_ends(newest)
                report = await apply_publication(self._services.engine, self._services.gate, newest, self.policy)
            except EngineError as exc:
                log.warning("the engine died of version %d: %s", newest.version, exc)
                self._services.engine_lost.set()
            except PublishError as exc:
                await self._refused(newest, exc)
            else:
                self.cannot_load = ""
                self._waiting.end()
                await self._count(report)

    async def _cohort_ends(self, newest: Publication) -> None:
        """one_step: what was admitted under an older version is drawn under it, wherever it runs (T5)."""
        if self._services.config.staleness.mode != "one_step" or self._services.engine.version < 0:
            return
        key = self._services.keys.cohorts
        while True:
            versions = await self._services.control.do(lambda client: client.hkeys(key))
            older = [int(v) for v in versions if int(v) < newest.version]
            if not older or self._services.engine_lost.is_set():
                return
            self._waiting.for_(f"the cohort admitted at version {min(older)} to end before version {newest.version}")
            await asyncio.sleep(LOOK_S)

    async def _refused(self, refused: Publication, exc: PublishError) -> None:
        self.cannot_load = str(exc)
        log.error("version %d is not loaded: %s", refused.version, exc)
        self._waiting.for_(f"a version of {refused.model} that can be loaded; {refused.version} cannot: {exc}")
        before = self._last
        await asyncio.sleep(RETRY_S)
        await self.look()
        if self._last != before:
            self._waiting.end()

    async def _count(self, report: ApplyReport) -> None:
        log.info(
            "version %d loaded (%s): paused %.1f ms, %d aborted",
            report.version,
            report.policy,
            report.pause_s * 1000,
            report.num_aborted,
        )
        counters = self._services.keys.counters

        async def add(client: object) -> None:
            pipe = client.pipeline(transaction=False)  # type: ignore[attr-defined]
            pipe.hincrby(counters, "weight_updates", 1)
            pipe.hincrby(counters, "weight_pause_us", int(report.pause_s * 1e6))
            await pipe.execute()

        await self._services.control.do(add)
