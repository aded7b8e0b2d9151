"""The weights task: follow the publications of a model and apply the newest by the run's policy."""

import asyncio
import logging

from penstock.control import AsyncControl, Client
from penstock.errors import EngineDied, ProtocolError, PublishError, QueueFull
from penstock.messages import Publication
from penstock.scripts import translate
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
        #: What the engine has, or had when it was lost.
        self.loaded: Publication | None = None
        #: Why the newest cannot be loaded; shown in presence.
        self.cannot_load = ""

    @property
    def policy(self) -> Policy:
        """one_step always drains: its batches are of one version each (T5)."""
        if self._services.engine.version < 0:
            return "abort"  # nothing runs before there are weights, so there is nothing to wait for
        config = self._services.config
        return "drain" if config.staleness.mode == "one_step" else config.worker.apply

    async def look(self) -> Publication | None:
        """Read the newest publication, without blocking on the stream."""
        self._take(await self._reader.do(lambda client: client.xrevrange(self._key, count=1)))
        return self.newest

    async def start_engine(self) -> None:
        """Weights before work (I9): start with the newest; where it cannot be loaded with those it had, else without.

        Raises:
            ConfigError, EngineDied, EngineError: as ``Engine.start``.
        """
        newest = await self.look()
        for publication in (newest, self.loaded if self.loaded is not newest else None):
            if publication is None:
                continue
            try:
                await self._services.engine.start(publication)
            except PublishError as exc:
                if publication is newest:
                    self._say(publication, exc)
                continue
            self._is_loaded(publication)
            return
        await self._services.engine.start(None)

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
        if not entries or entries[0][0].decode() == self._last:
            return
        entry, fields = entries[0]
        self._last = entry.decode()
        try:
            self.newest = Publication.from_bytes(fields.get(b"p", b""), f"publication {self._last}")
        except ProtocolError as exc:
            self.cannot_load = str(exc)
            log.error("a publication is left out: %s", exc)

    def _is_behind(self, newest: Publication) -> bool:
        engine = self._services.engine
        return (engine.version, engine.rev) < (newest.version, newest.rev)

    async def catch_up(self) -> None:
        """Bring the engine to the newest publication."""
        while (newest := self.newest) is not None and self._is_behind(newest):
            services = self._services
            if services.engine_lost.is_set():
                await asyncio.sleep(LOOK_S)  # the engine task starts it with the newest one
                continue
            birth = services.births
            try:
                await self._cohort_ends(newest)
                report = await self._apply(newest)
            except EngineDied as exc:
                log.warning("the engine died of version %d: %s", newest.version, exc)
                services.lose_engine(birth, str(exc))
            except PublishError as exc:
                await self._refused(newest, exc)
            else:
                if report is not None:
                    self._is_loaded(newest)
                    await self._count(report)

    async def _apply(self, newest: Publication) -> ApplyReport | None:
        """Apply, but for an engine that is lost meanwhile: its successor has weights of its own. None then."""
        lost = asyncio.create_task(self._services.engine_lost.wait())
        applying = asyncio.create_task(
            apply_publication(self._services.engine, self._services.gate, newest, self.policy)
        )
        try:
            await asyncio.wait({applying, lost}, return_when=asyncio.FIRST_COMPLETED)
            return applying.result() if applying.done() else None
        finally:
            lost.cancel()
            applying.cancel()
            await asyncio.gather(applying, lost, return_exceptions=True)

    async def _cohort_ends(self, newest: Publication) -> None:
        """one_step: what was admitted under an older version is drawn under it, wherever it runs (T5)."""
        loaded = self._services.engine.version
        if self._services.config.staleness.mode != "one_step" or loaded < 0:
            return
        if any(first <= loaded <= last for first, last in newest.abandoned):
            return  # what would be drawn under a version that no longer lives could not be trained (T1)
        key = self._services.keys.cohorts
        while True:
            versions = await self._services.control.do(lambda client: client.hkeys(key))
            older = [int(v) for v in versions if int(v) < newest.version]
            if not older or self._services.engine_lost.is_set():
                return
            self._waiting.for_(f"the cohort admitted at version {min(older)} to end before version {newest.version}")
            await asyncio.sleep(LOOK_S)

    def _is_loaded(self, publication: Publication) -> None:
        self.loaded = publication
        if publication is self.newest:
            self.cannot_load = ""
            self._waiting.end()

    async def _refused(self, refused: Publication, exc: PublishError) -> None:
        """Its folder may be gone because there is a newer one; else say so, and try again after a while."""
        if await self.look() is not refused:
            return
        self._say(refused, exc)
        await asyncio.sleep(RETRY_S)
        await self.look()

    def _say(self, refused: Publication, exc: PublishError) -> None:
        if self.cannot_load != str(exc):
            log.error("version %d is not loaded: %s", refused.version, exc)
        self.cannot_load = str(exc)
        self._waiting.for_(f"a version of {refused.model} that can be loaded; {refused.version} cannot: {exc}")

    async def _count(self, report: ApplyReport) -> None:
        log.info(
            "version %d loaded (%s): paused %.1f ms, %d aborted",
            report.version,
            report.policy,
            report.pause_s * 1000,
            report.num_aborted,
        )
        tally, counters = self._services.tally, self._services.keys.counters
        tally.weight_updates += 1
        tally.weight_pause_s += report.pause_s

        async def add(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            pipe.hincrby(counters, "weight_updates", 1)
            pipe.hincrby(counters, "weight_pause_us", int(report.pause_s * 1e6))
            try:
                await pipe.execute()
            except Exception as exc:
                raise translate(exc, "count") from exc

        try:
            await self._services.control.do(add)
        except QueueFull as exc:
            log.warning("an update of weights is not counted: %s", exc)
