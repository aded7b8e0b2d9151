"""The weights task: follow the publications of a model and apply the newest by the run's policy."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.config.staleness import Mode
from penstock.errors import EngineDied, EngineError, ProtocolError, PublishError, QueueFull
from penstock.protocol.memory_control import parse_wish
from penstock.protocol.scripts import note, translate
from penstock.protocol.waits import Waiting
from penstock.records.causes import MemoryOffloaded, VersionRefused, VersionSetAside
from penstock.records.codec import pack
from penstock.records.publication import Publication
from penstock.redis.commands import AsyncClient
from penstock.redis.control import AsyncControl
from penstock.text import MAX_SAID, utf8_safe
from penstock.workers.health import shorten
from penstock.workers.services import Services
from penstock.workers.weights.apply import Adoption, ApplyReport, Policy, apply_publication, unless_lost
from penstock.workers.weights.choice import Choice
from penstock.workers.weights.copies import Here
from penstock.workers.weights.ends import Ends
from penstock.workers.weights.folders import Folders, FolderToCome
from penstock.workers.weights.memory import Memory
from penstock.workers.weights.receive.transfers import Transfers

log = logging.getLogger(__name__)


async def count_update(services: Services, report: ApplyReport) -> None:
    """Count an update, here and in Redis. Blocks for a round trip."""
    log.info(
        "version %d loaded (%s): paused %.1f ms, %d aborted",
        report.version,
        report.policy,
        report.pause_s * 1000,
        report.num_aborted,
    )
    tally, counters = services.tally, services.keys.counters
    tally.weight_updates += 1
    tally.weight_pause_s += report.pause_s
    tally.weight_load_s += report.load_s
    tally.weight_wait_s += report.wait_s

    async def add(client: AsyncClient) -> None:
        pipe = client.pipeline(transaction=False)
        pipe.hincrby(counters, "weight_updates", 1)
        pipe.hincrby(counters, "weight_pause_us", int(report.pause_s * 1e6))
        try:
            await pipe.execute()
        except Exception as exc:
            raise translate(exc, "count") from exc

    try:
        await services.control.do(add)
    except QueueFull as exc:
        log.warning("an update of weights is not counted: %s", exc)


#: Longest blocking read of the stream.
BLOCK_MS = 1000
#: Polling interval while the engine is lost, and retry interval of a publication that cannot be loaded.
LOOK_S, RETRY_S = 0.05, 1.0
#: Polling interval for memory requests while the engine may not start.
WISH_S = 0.2


async def _nothing() -> None:
    """Do nothing."""


class Updates:
    """Follow the newest publication and load it into the engine.

    Args:
        reader: a connection of its own for blocking reads.
    """

    def __init__(self, services: Services, reader: AsyncControl, waiting: Waiting) -> None:
        self._services = services
        self._reader = reader
        self._waiting = waiting
        self._key = services.keys.weights(services.config.model.name)
        self._last = "0-0"
        self._memory_key = services.keys.memory(services.config.model.name)
        self._last_wish = b"0-0"
        #: Requests for the engine's memory.
        self.memory = Memory(services)
        #: Weights that are sent without the disk.
        self.transfers = Transfers(
            services.engine,
            services.keys,
            services.worker,
            named=services.config.trainer.transport,
            control=services.control,
            reader=reader,
            waiting=waiting,
            timeout_s=services.config.trainer.transfer_timeout_s,
            birth=lambda: services.births,
            instead=self._instead,
        )
        #: Fetches folders to this machine, or makes them from deltas.
        self.here = Here(services.config, services.keys, waiting, services.tally)
        #: Folders that may be written after their announcement.
        self.folders = Folders(
            services.keys,
            services.control,
            waiting,
            self.look,
        )
        self._adoption = Adoption(services, self.folders)
        self._ends = Ends(services, waiting, self.folders)
        self._choice = Choice(services, reader, self.folders, self._ends, waiting)
        #: Newest announced publication.
        self.newest: Publication | None = None
        #: Publication the engine has, or had when it was lost.
        self.loaded: Publication | None = None
        #: Publication loaded instead of one that was sent in part; announced, and with its local folder.
        self._later: tuple[Publication, Publication] | None = None
        #: Hands back all leased jobs; set by the task that holds the leases.
        self.let_go: Callable[[], Awaitable[None]] = _nothing
        #: Why the newest cannot be loaded; shown in presence.
        self.cannot_load = ""

    @property
    def policy(self) -> Policy:
        """Return the policy of the next update. one_step always drains: each of its batches has one version (T5)."""
        engine = self._services.engine
        if engine.version < 0 or engine.offloaded:
            return "abort"  # no request runs without weights or memory
        config = self._services.config
        return "drain" if config.staleness.rules.drains else config.worker.apply

    async def look(self) -> Publication | None:
        """Read the newest publication, without blocking on the stream."""
        self._take(await self._reader.do(lambda client: client.xrevrange(self._key, count=1)))
        return self.newest

    async def start_engine(self) -> None:
        """Start the engine with weights before it gets jobs (I9).

        Loads the newest version, or that of the oldest cohort (one_step). If it cannot be loaded or has no folder yet,
        loads the version the engine had, or an earlier one; if none can be loaded, starts without weights.

        Raises:
            ConfigError, EngineDied, EngineError: as ``Engine.start``.
        """
        await self._all_memory_is_wanted()
        newest = await self.look()
        self.memory.reset()
        await self._read_aside()
        for publication in await self._choice.to_start_with(newest, self.loaded):
            if await self._start_with(publication):
                return
        await self._services.engine.start(None)

    async def _start_with(self, publication: Publication) -> bool:
        """Start with a publication; return False if it cannot be loaded. Retries one before the newest (one_step)."""
        services, passed = self._services, self._choice.passed
        is_newest = self.newest is not None and publication.id == self.newest.id
        while True:
            try:
                self.transfers.check(publication)
                await self._hold(publication)
                here = await self.here.of(publication)
                await services.engine.start(here)
            except PublishError as exc:
                if is_newest:
                    self._report(publication, exc)
                if is_newest or not services.config.staleness.rules.drains or not await passed.after(publication, exc):
                    return False
            except EngineError as exc:
                # A version that kills engines must not block the newest forever.
                if not is_newest and services.config.staleness.rules.drains and not services.engine.is_away:
                    passed.count(publication, exc)
                raise
            else:
                await self._note_loaded(publication, here)
                return True

    async def run(self) -> None:
        """Follow the stream until cancelled; an engine lost during an update is left to the engine task."""
        while True:
            await self._follow()
            await self._read_aside()
            await self._restart_if_aside()
            await self.settle_memory()
            await self.catch_up()

    async def _follow(self) -> None:
        if ((newest := self.newest) is not None and self._is_behind(newest)) or not self.memory.is_settled():
            return
        after = {self._key: self._last, self._memory_key: self._last_wish}
        for key, entries in await self._reader.do(lambda client: client.xread(after, block=BLOCK_MS)) or ():
            if key == self._key.encode():
                self._take(entries[-1:])
            else:
                self._take_wish(entries)

    def _take_wish(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if entries:
            self._last_wish = entries[-1][0]
            try:
                self.memory.take(parse_wish(entries))
            except ProtocolError as exc:
                log.error("memory request ignored: %s", exc)

    async def _read_aside(self) -> None:
        """Read which publications engines crashed on; serve an earlier one instead if the bound allows (T12)."""
        services, key = self._services, self._services.keys.aside(self._services.config.model.name)
        found = await services.control.do(lambda client: client.hgetall(key))
        aside = {name.decode(errors="replace"): text.decode(errors="replace") for name, text in found.items()}
        self._choice.aside = aside
        newest, staleness = self.newest, services.config.staleness
        before, services.stands_in_for = services.stands_in_for, -1
        if newest is None or newest.id not in aside:
            return
        lag = newest.version - services.engine.version
        if staleness.mode is Mode.ASYNC and services.engine.version >= 0 and 0 < lag <= staleness.bound:
            services.stands_in_for = newest.version
            if before != newest.version:
                services.may_start_more.set()
        why = f"engines crashed on it before producing output; last error: {shorten(aside[newest.id])}"
        self.cannot_load = f"version {newest.version} (revision {newest.rev}) was set aside: {why}"
        self._waiting.blocked_on(VersionSetAside(newest.model, newest.version, shorten(aside[newest.id])))

    async def _restart_if_aside(self) -> None:
        """Restart an engine whose publication was set aside, and hand its jobs back."""
        services = self._services
        if services.publication not in self._choice.aside or services.engine_lost.is_set():
            return
        birth, left = services.births, services.publication
        log.error("publication %s was set aside: restarting the engine without it", left)
        await self.let_go()
        services.lose_engine(birth, f"publication {left} was set aside")

    async def _all_memory_is_wanted(self) -> None:
        """Wait until all of the engine's memory is requested, so that the trainer does not use its GPU."""
        while True:
            self._take_wish(await self._reader.do(lambda client: client.xrevrange(self._memory_key, count=1)))
            if not self.memory.wanted:
                return
            self._waiting.blocked_on(MemoryOffloaded(tuple(sorted(self.memory.wanted)), self.memory.asked_by))
            await asyncio.sleep(WISH_S)

    async def pause(self, wait_s: float) -> None:
        """Sleep before the next start of a lost engine, unless an immediate start is requested."""
        deadline = time.monotonic() + wait_s
        while not self.memory.revive.is_set() and (left := deadline - time.monotonic()) > 0:
            self._take_wish(await self._reader.do(lambda client: client.xrevrange(self._memory_key, count=1)))
            await asyncio.sleep(min(left, WISH_S))
        self.memory.revive.clear()

    def _take(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if not entries or entries[0][0].decode() == self._last:
            return
        entry, fields = entries[0]
        self._last = entry.decode()
        try:
            self.newest = Publication.from_bytes(fields.get(b"p", b""), f"publication {self._last}")
        except ProtocolError as exc:
            self.cannot_load = str(exc)
            log.error("publication ignored: %s", exc)

    def _is_behind(self, newest: Publication) -> bool:
        engine = self._services.engine
        if "weights" in engine.offloaded:
            return False  # loaded when the memory is allocated again
        if engine.offloaded and self._services.config.staleness.rules.drains:
            return False  # its cohort has to end first, which needs the memory
        if newest.id in self._choice.aside:
            return False  # engines crashed on it
        return (engine.version, engine.rev) < (newest.version, newest.rev)

    async def catch_up(self) -> None:
        """Load the newest publication into the engine."""
        while (newest := self.newest) is not None and self._is_behind(newest):
            services = self._services
            if services.engine_lost.is_set():
                await asyncio.sleep(LOOK_S)  # the engine task starts it with the newest one
                continue
            birth = services.births
            try:
                self.transfers.check(newest)
                await self._hold(newest)
                await self._bring(newest)
            except EngineDied as exc:
                log.warning("engine crashed while loading version %d: %s", newest.version, exc)
                services.lose_engine(birth, str(exc))
            except PublishError as exc:
                await self._refused(newest, exc)

    async def _bring(self, newest: Publication) -> None:
        """Load a publication into the engine: by the transfer, or from its folder once that exists.

        Raises:
            PublishError: another one was announced before it had a folder, or it cannot be loaded.
            EngineDied: the engine crashed.
        """
        whole = await self._choice.now(newest)
        if whole is None and self.transfers.may_take(newest):
            if not await self._ends.wait(newest, self._choice.out):
                return
            try:
                await self._loaded_by(await self._apply(newest), newest, newest)
            except FolderToCome as exc:
                log.info("%s", exc)
            else:
                return
        whole = whole or await self._choice.in_time(newest)
        if await self._adopt(whole):
            return
        try:
            if whole.id != newest.id:
                await self._hold(whole)
            here = await self.here.of(whole)
            if await self._ends.wait(whole, self._choice.out):
                await self._loaded_by(await self._apply(here), whole, here)
        except PublishError as exc:
            if whole.id == newest.id:
                raise
            await self._choice.passed.after(whole, exc)

    async def _adopt(self, publication: Publication) -> bool:
        """Adopt a publication whose weights the engine has; return False if it has to be loaded.

        Also True if the engine was lost meanwhile, or another publication has to be loaded first. Raises EngineDied.
        """
        if not await self._adoption.is_due(publication, self.loaded):
            return False
        if not await self._ends.wait(publication, self._choice.out):
            return True
        here = self._adoption.with_folder(publication)
        adopted = await unless_lost(self._services.engine_lost, self._adoption.take(here, self.loaded))
        if adopted:
            await self._note_loaded(publication, here)
        return adopted is not False

    async def _loaded_by(self, report: ApplyReport | None, publication: Publication, here: Publication) -> None:
        if report is None:
            return
        if report.version != publication.version and self._later is not None:
            publication, here = self._later
        await self._note_loaded(publication, here)
        await count_update(self._services, report)

    async def _instead(self, publication: Publication) -> Publication:
        """Return the publication or a later one, on this machine, for an engine with partly updated weights."""
        limit_s = self._services.config.trainer.transfer_timeout_s
        found = await self.folders.of_this_or_later(publication, limit_s)
        here = await self.here.of(found)
        self._later = found, here
        return here

    async def settle_memory(self) -> None:
        """Apply memory requests to the engine."""
        services = self._services
        if self.memory.is_settled():
            return
        if services.engine_lost.is_set():
            await asyncio.sleep(LOOK_S)  # the engine is not started before all memory is requested
            return
        birth, newest = services.births, (here := await self.look())
        weights_back = "weights" in services.engine.offloaded and "weights" not in self.memory.wanted
        chosen = newest
        if weights_back and newest is not None:
            try:
                self.transfers.check(newest)
                chosen = await self._choice.in_time(newest, in_its_stead=False)
                here = await self.here.of(chosen)
            except PublishError as exc:
                if chosen is None or chosen.id == newest.id:
                    await self._refused(newest, exc)
                else:
                    await self._choice.passed.after(chosen, exc)
                return
        try:
            await self.memory.settle(here, self.policy)
        except (EngineDied, PublishError) as exc:
            log.warning("engine crashed during a change of memory: %s", exc)
            services.lose_engine(birth)
        else:
            if weights_back and chosen is not None and here is not None:
                await self._note_loaded(chosen, here)
            services.may_start_more.set()
            services.show.set()

    async def _apply(self, newest: Publication) -> ApplyReport | None:
        """Apply, and return None if the engine is lost meanwhile: its successor has weights of its own."""
        services = self._services
        change = apply_publication(services.engine, services.valves, newest, self.policy, self.transfers)
        return await unless_lost(services.engine_lost, change)

    async def _hold(self, publication: Publication) -> None:
        """Record the version to load and the loaded one, so that their folders are kept."""
        services = self._services
        keys, model = services.keys, services.config.model.name
        versions = {publication.version} | ({self.loaded.version} if self.loaded is not None else set())
        record = pack({"versions": sorted(versions), "at": time.time()})
        await services.control.call(note(keys, keys.loading(model), services.worker, record))

    async def _note_loaded(self, publication: Publication, here: Publication) -> None:
        """Record the engine's publication; ``here``: with its folder on this machine."""
        self.loaded, self._later = publication, None
        self._adoption.note_loaded(publication, here)
        self._choice.passed.clear()
        if self.newest is not None and publication.id == self.newest.id:
            self.cannot_load = ""
            self._waiting.end()
        self._services.may_start_more.set()
        await self.transfers.learn(here)
        self._services.show.set()

    async def _refused(self, refused: Publication, exc: PublishError) -> None:
        """Report a publication that failed to load and wait before a retry, unless a newer one was announced."""
        newest = await self.look()
        if newest is None or newest.id != refused.id:
            return
        self._report(refused, exc)
        await asyncio.sleep(RETRY_S)
        await self.look()

    def _report(self, refused: Publication, exc: PublishError) -> None:
        why, model = utf8_safe(str(exc), MAX_SAID), self._services.config.model.name
        if self.cannot_load != why:
            log.error("version %d is not loaded: %s", refused.version, why)
        self.cannot_load = why
        self._waiting.blocked_on(exc.cause or VersionRefused(model, refused.version, why))
