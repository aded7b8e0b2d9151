"""Preconditions for loading new weights: the end of a cohort, and of an evaluation pinned to its version."""

import asyncio
import time
from collections.abc import Collection

from penstock.names import Lane
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState, parse_workers
from penstock.protocol.scripts import cohorts_in, loading_in, translate
from penstock.protocol.waits import Waiting
from penstock.records.causes import CohortRunning, EvaluationRunning
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.commands import AsyncClient
from penstock.workers.services import Services
from penstock.workers.weights.folders import Folders

#: Polling interval for a running cohort, and for a running evaluation.
LOOK_S, EVAL_LOOK_S = 0.05, 0.2
#: Longest time from the end of a lease to its job being taken over.
TAKEN_OVER_S = 2.0


class Ends:
    """Check and await the preconditions of one engine. Every wait is reported and ends if the engine is lost."""

    def __init__(self, services: Services, waiting: Waiting, folders: Folders) -> None:
        self._services = services
        self._waiting = waiting
        self._folders = folders

    async def first(self, newest: Publication, out: Collection[str], had: int = -1) -> Publication | None:
        """Return the earlier version to load first for its cohort (one_step, T5), with its folder; else None.

        If the disk is slower than a step, the folder of ``newest`` may appear together with the earlier one. An engine
        without weights, or with offloaded weights, begins with the oldest cohort.

        Args:
            out: publications to skip (VERSION-REV).
            had: version that an engine without weights had; -1: none. No version before it is returned.
        """
        if not self._services.config.staleness.rules.drains:
            return None
        return await self._first(await self._cohorts(), newest, out, had)

    async def _first(
        self, cohorts: list[int], newest: Publication, out: Collection[str], had: int = -1
    ) -> Publication | None:
        engine = self._services.engine
        oldest = min(cohorts, default=newest.version)
        if engine.version < 0 or "weights" in engine.offloaded:
            oldest = max(oldest, engine.version, had)
        elif oldest <= engine.version:
            return None  # the engine generates that cohort
        if oldest >= newest.version or (found := await self._folders.earliest(oldest, newest, out)) is None:
            return None
        # Its folder may have appeared after others began the cohort with a later version; then use that version.
        others = (await self._generating()).values()
        begun = max((one for one in others if one <= newest.version and not newest.abandons(one)), default=-1)
        return found if begun <= found.version else await self._folders.earliest(begun, newest, out)

    async def wait(self, newest: Publication, out: Collection[str]) -> bool:
        """Wait until ``newest`` may be loaded; the engine keeps running.

        Args:
            out: as of ``first``.

        Returns:
            False: load another publication first.
        """
        engine = self._services.engine
        if engine.offloaded:
            return True
        if newest.abandons(engine.version):
            return True  # tokens of an abandoned version could not be trained on (T1)
        if self._services.config.staleness.rules.drains and not await self._cohorts_end(newest, out):
            return False
        if self._services.config.data.eval_pinned and engine.version >= 0:
            return await self._evaluation_ends(newest, engine.version)
        return True

    async def is_held_up(self, one: Publication, newest: Publication, out: Collection[str]) -> bool:
        """Return whether ``one`` has to wait for an older cohort that another engine generates (one_step).

        Args:
            newest: knows which versions are abandoned.
            out: as of ``first``.
        """
        if not self._services.config.staleness.rules.drains:
            return False
        older = [version for version in await self._cohorts() if version < one.version]
        elsewhere = await self._elsewhere(newest, out) if older else []
        return any(version <= other < one.version for version in older for other in elsewhere)

    async def _cohorts_end(self, newest: Publication, out: Collection[str]) -> bool:
        """Wait until all cohorts older than ``newest`` have ended (one_step, T5).

        A cohort that needs newer weights than this engine has is waited for only while another engine may generate it;
        otherwise, for example if its version was abandoned before any engine loaded it, it is generated with
        ``newest``. Return False if the cohort's version can be loaded here now, or if ``_is_over``.
        """
        engine = self._services.engine
        while True:
            older = [version for version in await self._cohorts() if version < newest.version]
            if await self._first(older, newest, out) is not None:
                self._waiting.end()
                return False
            if any(v > engine.version for v in older):
                elsewhere = await self._elsewhere(newest, out)
                older = [v for v in older if v <= engine.version or any(v <= one for one in elsewhere)]
            if not older or self._services.engine_lost.is_set():
                return True
            if await self._is_over(newest):
                return False
            self._waiting.blocked_on(CohortRunning(min(older), newest.version))
            await asyncio.sleep(LOOK_S)

    async def _is_over(self, newest: Publication) -> bool:
        """Return whether ``newest``, or the engine's version, was abandoned: its tokens are lost (T1)."""
        announced = await self._folders.newest()
        if announced is None or announced.id == newest.id:
            return False
        is_over = announced.abandons(newest.version) or announced.abandons(self._services.engine.version)
        if is_over:
            self._waiting.end()
        return is_over

    async def _cohorts(self) -> list[int]:
        """Return versions with admitted jobs that are not done."""
        key = self._services.keys.cohorts
        return cohorts_in(await self._services.control.do(lambda client: client.hkeys(key)))

    async def _elsewhere(self, newest: Publication, out: Collection[str]) -> list[int]:
        """Return versions before ``newest`` that other engines generate with or are loading.

        Workers without an engine, or with a wrong clock, are ignored: they may never come back.
        """
        services = self._services
        keys, model = services.keys, services.config.model.name
        generating = await self._generating()
        loading = await services.control.do(lambda client: client.hgetall(keys.loading(model)))
        dead = {name.partition("-")[0] for name in out}
        found = list(generating.values())
        for worker, _, versions in loading_in(loading):
            # The record also lists the version it had before.
            current = generating.get(worker)
            found += [one for one in versions if current is not None and one > current and str(one) not in dead]
        return [version for version in found if version < newest.version and not newest.abandons(version)]

    async def _generating(self) -> dict[str, int]:
        """Return name -> version of other workers that generate.

        A stalled worker counts while its leases are valid: it may resume and commit.
        """
        services, now = self._services, time.time()
        silent_s = max(FRESH_S, services.config.worker.lease_s + TAKEN_OVER_S)
        shown = parse_workers(await services.control.do(lambda client: client.hgetall(services.keys.workers)))
        return {
            one.name: one.version
            for one in shown
            if one.name != services.worker and abs(now - one.at) <= silent_s and _is_generating(one)
        }

    async def _evaluation_ends(self, newest: Publication, loaded: int) -> bool:
        """Wait until the evaluation jobs of the loaded version have ended (data.eval_pinned, T18).

        Return False if ``_is_over``.
        """
        services = self._services
        keys = services.keys
        while not services.engine_lost.is_set():
            jobs, is_paused = await services.control.do(lambda client: _evaluating(client, keys))
            left = sum(_asked_version(job) == loaded for job in jobs)
            if not left or is_paused:
                return True
            if await self._is_over(newest):
                return False
            self._waiting.blocked_on(EvaluationRunning(loaded, left, newest.version))
            await asyncio.sleep(EVAL_LOOK_S)
        return True


def _is_generating(one: WorkerPresence) -> bool:
    """Return whether a worker generates, or finishes what it holds."""
    serves = one.state in (WorkerState.SERVING, WorkerState.CANNOT_LOAD)
    return one.version >= 0 and (serves or (one.state == WorkerState.DRAINING and one.held > 0))


async def _evaluating(client: AsyncClient, keys: Keys) -> tuple[list[bytes], bool]:
    """Return evaluation's unfinished jobs, and whether their lane is paused."""
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.unfinished(Lane.EVAL), 0, -1)
    pipe.sismember(keys.paused, Lane.EVAL)
    try:
        jobs, is_paused = await pipe.execute()
    except Exception as exc:
        raise translate(exc, "evaluating") from exc
    return jobs, bool(is_paused)


def _asked_version(job: bytes) -> int:
    """Return the version that an evaluation's job asks for; -1 for jobs of other programs."""
    parts = job.rsplit(b"/", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else -1
