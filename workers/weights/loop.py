"""The weights task: follow the publications of a model and load what is selected (docs/internals/weights.md).

    read the view -> select -> act -> read the view again

No action waits for a later version. What is about to be loaded is written to Redis, and the view read again, before the
engine is touched: of two workers that select at once, at least one sees what the other is about to do.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from penstock.config.staleness import Mode
from penstock.errors import EngineDied, EngineError, ProtocolError, PublishError, QueueFull
from penstock.protocol.memory_control import parse_wish
from penstock.protocol.scripts import note, translate
from penstock.protocol.waits import Waiting
from penstock.records.codec import pack
from penstock.records.publication import Publication
from penstock.records.worker_causes import MemoryOffloaded, VersionRefused, VersionRetried, VersionSetAside
from penstock.redis.commands import AsyncClient
from penstock.redis.control import AsyncControl
from penstock.text import MAX_SAID, shorten_reason, utf8_safe
from penstock.workers.engine import NotBegun, Partial
from penstock.workers.services import Services
from penstock.workers.weights.apply import ApplyReport, Policy, Updater, unless_lost
from penstock.workers.weights.memory import Memory
from penstock.workers.weights.receive.receive import Transfers
from penstock.workers.weights.select import (
    Adopt,
    Decision,
    Keep,
    Load,
    Purpose,
    Restart,
    View,
    Wait,
    select_version,
)
from penstock.workers.weights.store import WeightStore
from penstock.workers.weights.view import ViewReader

log = logging.getLogger(__name__)

#: Longest blocking read of the streams: of an engine that has what it should, of one that waits, and during a fetch.
IDLE_S, LOOK_S, GLANCE_S = 1.0, 0.05, 0.001
#: Interval of attempts to load a publication, and attempts before one that is not the newest is skipped (one_step):
#: disk errors may be transient.
RETRY_S, TRIES = 1.0, 3
#: Polling interval for memory requests while the engine may not start.
MEMORY_S = 0.2


class WeightLoop:
    """Keep one engine at the version that is selected for it.

    Args:
        reader: a connection of its own for blocking reads.
    """

    def __init__(self, services: Services, reader: AsyncControl, waiting: Waiting) -> None:
        self._services, self._reader, self._waiting = services, reader, waiting
        keys, model = services.keys, services.config.model.name
        self._memory_key = keys.memory(model)
        self._last_wish = b"0-0"
        #: Requests for the engine's memory.
        self.memory = Memory(services)
        #: Weights that are sent without the disk.
        self.transfers = Transfers(services, reader, waiting)
        #: Folders of weights on this machine.
        self.store = WeightStore(services.config, keys, waiting, services.tally)
        self._views = ViewReader(services)
        self._updater = Updater(services.engine, services.valves, self.transfers.prepare)
        #: Publication the engine has, or had when it was lost; and its folder here, if that is not the announced one.
        self.loaded: Publication | None = None
        self._local_path = ""
        #: Publications that this engine failed to load before, or instead of, the newest, and how often.
        self._failed: Counter[str] = Counter()
        #: Publications (VERSION-REV) that were not sent to this engine, and whose number its server could not take.
        self._unsent = self._unadopted = ""
        #: Version of which the engine received some weights and not all (-1: none), and when it is given up.
        self._partial, self._given_up_at = -1, 0.0
        #: Versions that were last noted as about to be loaded.
        self._intent: set[int] = set()
        #: Version whose folder the engine waits for, while it could receive the next one sent; -1: none.
        self.awaits = -1
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

    async def run(self) -> None:
        """Follow the publications until cancelled; a lost engine is left to the supervisor."""
        while True:
            if wait_s := await self.step():
                await self._listen(wait_s)

    async def step(self) -> float:
        """Read the view, select a version and apply it.

        Returns the longest wait in seconds before the next read, which a notification ends early; 0: read at once.
        """
        services = self._services
        if services.engine_lost.is_set():
            return LOOK_S  # the supervisor starts it with the version that is selected then
        has_to_settle = not self.memory.is_settled() and self._partial < 0
        is_back = has_to_settle and "weights" in services.engine.offloaded and "weights" not in self.memory.wanted
        view = await self._view(Purpose.MEMORY if is_back else Purpose.RUN)
        self._report_unusable(view)
        decision, birth = select_version(view), services.births
        try:
            if has_to_settle and (not is_back or isinstance(decision, Keep)):
                await self._settle(None, None)
                return 0.0
            return await self._act(view, decision)
        except EngineDied as exc:
            log.warning("engine crashed during a change of its weights or memory: %s", exc)
            services.lose_engine(birth, str(exc))
            return 0.0

    async def _act(self, view: View, decision: Decision) -> float:
        services, newest, target = self._services, view.newest, None
        is_waiting = isinstance(decision, Wait)
        self.awaits = newest.version if is_waiting and newest and not newest.is_whole and not view.is_sendable else -1
        if isinstance(decision, Load | Adopt):
            target = decision.publication
        elif isinstance(decision, Wait):
            target = decision.target or newest
        if target is not None:
            is_new = await self._note_intent(target)
            # Enrolling fails if a later version was announced meanwhile, and no folder may be gone.
            enrolls = isinstance(decision, Load) and decision.is_sent and not target.is_whole and not view.drains
            if is_new and not enrolls:
                return 0.0
        match decision:
            case Load(publication, is_sent):
                return await self._load(view, publication, is_sent=is_sent)
            case Adopt(publication):
                await self._adopt(publication)
                return 0.0
            case Wait(cause, ahead):
                self._waiting.blocked_on(cause)
                if ahead is not None and ahead.is_whole and not view.is_sendable:
                    self.store.prefetch(ahead)
                return LOOK_S
            case Restart(reason):
                log.error("restarting the engine: %s", reason)
                services.lose_engine(services.births, reason, hands_back=self._partial < 0)
                return LOOK_S
        return IDLE_S

    async def _load(self, view: View, publication: Publication, *, is_sent: bool) -> float:
        services = self._services
        try:
            self.transfers.check(publication)
            here = await self.store.fetch(publication) if publication.is_whole else publication
            if here is None:
                return GLANCE_S
            if view.purpose is Purpose.MEMORY:
                await self._settle(publication, here)
                return 0.0
            if view.engine.partial >= 0:
                change = self._updater.complete(here)
            else:
                change = self._updater.apply(here, self.policy, is_sent=is_sent)
            report = await unless_lost(services.engine_lost, change)
        except NotBegun as exc:
            log.info("%s", exc)
            self._unsent = publication.id
        except Partial as exc:
            log.warning("a folder is loaded instead: %s", exc)
            self._partial = publication.version
            self._given_up_at = time.monotonic() + services.config.trainer.transfer_timeout_s
        except PublishError as exc:
            return await self._refused(publication, publication is view.newest, exc)
        else:
            if report is not None:
                await self._note_loaded(publication, here)
                await self._count_update(report)
        return 0.0

    async def _adopt(self, publication: Publication) -> None:
        # Engines of a router that join later load its folder on this machine.
        here = replace(publication, path=self._local_path or publication.path)
        adopted = await unless_lost(self._services.engine_lost, self._updater.adopt(here))
        if adopted:
            await self._note_loaded(publication, here)
        elif adopted is False:
            self._unadopted = publication.id

    async def _settle(self, publication: Publication | None, here: Publication | None) -> None:
        """Apply a memory request to the engine; ``publication``: what its weights come back with."""
        await self.memory.settle(here, self.policy)
        if publication is not None and here is not None:
            await self._note_loaded(publication, here)
        self._services.may_start_more.set()
        self._services.show.set()

    async def start_engine(self) -> None:
        """Start the engine with weights before it gets jobs (I9); without, if none can be loaded.

        Raises:
            ConfigError, EngineDied, EngineError: as ``Engine.start``.
        """
        await self._all_memory_is_wanted()
        self.memory.reset()
        self._updater.reset()
        self._partial = -1
        services, refused = self._services, set[str]()
        while True:
            view = await self._view(Purpose.START, refused)
            self._report_unusable(view)
            decision = select_version(view)
            if not isinstance(decision, Load):
                return await services.engine.start(None)
            publication, is_newest = decision.publication, decision.publication is view.newest
            is_retried = not is_newest and services.config.staleness.rules.drains
            try:
                self.transfers.check(publication)
                # Once others can see what is loaded, and after a wait, the view may be another one.
                if await self._note_intent(publication) or (here := await self.store.fetch(publication)) is None:
                    continue
                await services.engine.start(here)
            except PublishError as exc:
                if is_newest:
                    self._report(publication, exc)
                if not is_retried or not await self._failed_again(publication, exc):
                    refused.add(publication.id)
            except EngineError as exc:
                # A version that kills engines must not block the newest forever.
                if is_retried and not services.engine.is_away:
                    self._count_failure(publication, exc)
                raise
            else:
                return await self._note_loaded(publication, here)

    async def _view(self, purpose: Purpose, refused: Iterable[str] = ()) -> View:
        """Read the view, with what this loop knows."""
        view = await self._views.read(purpose, self.loaded)
        newest, loaded = view.newest, view.loaded
        return replace(
            view,
            loaded=None if purpose is Purpose.RUN and newest and newest.id == self._unadopted else loaded,
            is_sendable=newest is not None and newest.id != self._unsent and self.transfers.may_take(newest),
            failed=frozenset(refused).union(one for one, count in self._failed.items() if count >= self._tries),
            engine=replace(view.engine, partial=self._partial),
            is_late=self._partial >= 0 and time.monotonic() > self._given_up_at,
        )

    async def _listen(self, wait_s: float) -> None:
        """Wait until something is announced, for at most ``wait_s``; take memory requests."""
        after = {self._views.key: self._views.last, self._memory_key: self._last_wish}
        block_ms = max(1, int(wait_s * 1000))
        for key, entries in await self._reader.do(lambda client: client.xread(after, block=block_ms)) or ():
            if key == self._memory_key.encode():
                self._take_wish(entries)

    def _take_wish(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if entries:
            self._last_wish = entries[-1][0]
            try:
                self.memory.take(parse_wish(entries))
            except ProtocolError as exc:
                log.error("memory request ignored: %s", exc)

    async def _all_memory_is_wanted(self) -> None:
        """Wait until all of the engine's memory is requested, so that the trainer does not use its GPU."""
        while True:
            await self._read_wish()
            if not self.memory.wanted:
                return
            self._waiting.blocked_on(MemoryOffloaded(tuple(sorted(self.memory.wanted)), self.memory.wish.by))
            await asyncio.sleep(MEMORY_S)

    async def pause(self, wait_s: float) -> None:
        """Sleep before the next start of a lost engine, unless an immediate start is requested."""
        deadline = time.monotonic() + wait_s
        while not self.memory.revive.is_set() and (left := deadline - time.monotonic()) > 0:
            await self._read_wish()
            await asyncio.sleep(min(left, MEMORY_S))
        self.memory.revive.clear()

    async def _read_wish(self) -> None:
        self._take_wish(await self._reader.do(lambda client: client.xrevrange(self._memory_key, count=1)))

    async def _note_intent(self, publication: Publication) -> bool:
        """Record the version to load and the loaded one, so that their folders are kept.

        Returns whether a record was written: False if both were recorded already.
        """
        services, model = self._services, publication.model
        versions = {publication.version} | ({self.loaded.version} if self.loaded is not None else set())
        if versions <= self._intent:
            return False
        self._intent = versions
        record = pack({"versions": sorted(versions), "at": time.time()})
        await services.control.call(note(services.keys, services.keys.loading(model), services.worker, record))
        return True

    async def _note_loaded(self, publication: Publication, here: Publication) -> None:
        """Record the engine's publication; ``here``: with its folder on this machine."""
        self.loaded, self._partial = publication, -1
        self._local_path = here.path if here.path != publication.path else ""
        self._failed.clear()
        self._waiting.end()
        if self._views.newest is not None and publication.id == self._views.newest.id:
            self.cannot_load = ""
        self._services.may_start_more.set()
        await self.transfers.learn(here)
        self._services.show.set()

    @property
    def _tries(self) -> int:
        return TRIES if self._services.config.staleness.rules.drains else 1

    def _count_failure(self, publication: Publication, why: Exception) -> bool:
        """Count a failure of a publication that is not the newest; return whether to try it again."""
        self._failed[publication.id] += 1
        is_skipped = self._failed[publication.id] >= self._tries
        if is_skipped:
            log.info("version %d is skipped: %s", publication.version, why)
        return not is_skipped

    async def _failed_again(self, publication: Publication, why: Exception) -> bool:
        """Count a failure; before a retry, wait and report the wait. Return whether to retry."""
        is_retried = self._count_failure(publication, why)
        if is_retried:
            cause = why.cause if isinstance(why, PublishError) else None
            self._waiting.blocked_on(cause or VersionRetried(publication.version, str(why)))
            await asyncio.sleep(RETRY_S)
            self._waiting.end()
        return is_retried

    async def _refused(self, publication: Publication, is_newest: bool, exc: PublishError) -> float:
        """Report a publication that failed to load; return the time before a retry, which a newer one ends."""
        if not is_newest:
            await self._failed_again(publication, exc)
            return 0.0
        newest = (await self._view(Purpose.RUN)).newest
        if newest is None or newest.id != publication.id:
            return 0.0  # its folder may be gone because there is a newer one
        self._report(publication, exc)
        return RETRY_S

    def _report(self, refused: Publication, exc: PublishError) -> None:
        why, model = utf8_safe(str(exc), MAX_SAID), self._services.config.model.name
        if self.cannot_load != why:
            log.error("version %d is not loaded: %s", refused.version, why)
        self.cannot_load = why
        self._waiting.blocked_on(exc.cause or VersionRefused(model, refused.version, why))

    def _report_unusable(self, view: View) -> None:
        """Report a newest publication that is malformed or set aside; let an earlier one serve (T12)."""
        services, newest, staleness = self._services, view.newest, self._services.config.staleness
        if self._views.malformed:
            if self.cannot_load != self._views.malformed:
                log.error("publication ignored: %s", self._views.malformed)
            self.cannot_load = self._views.malformed
        before, services.stands_in_for = services.stands_in_for, -1
        if newest is None or newest.id not in view.set_aside:
            return
        lag = newest.version - services.engine.version
        if staleness.mode is Mode.ASYNC and services.engine.version >= 0 and 0 < lag <= staleness.bound:
            services.stands_in_for = newest.version
            if before != newest.version:
                services.may_start_more.set()
        error = shorten_reason(self._views.set_aside[newest.id])
        why = f"engines crashed on it before producing output; last error: {error}"
        self.cannot_load = f"version {newest.version} (revision {newest.rev}) was set aside: {why}"
        self._waiting.blocked_on(VersionSetAside(newest.model, newest.version, error))

    async def _count_update(self, report: ApplyReport) -> None:
        """Count an update, here and in Redis. Blocks for a round trip."""
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
            await self._services.control.do(add)
        except QueueFull as exc:
            log.warning("an update of weights is not counted: %s", exc)
