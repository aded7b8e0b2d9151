"""What has to end before other weights are loaded: a cohort, and an evaluation that is pinned to its version."""

import asyncio
import time
from collections.abc import Collection

from penstock.names import Lane
from penstock.protocol.keys import Keys
from penstock.protocol.presence import FRESH_S, parse_workers
from penstock.protocol.records.publication import Publication
from penstock.protocol.scripts import cohorts_in, loading_in, translate
from penstock.protocol.waits import Waiting
from penstock.redis.commands import AsyncClient
from workers.services import Services
from workers.weights.folders import Folders

#: How often a cohort that still runs is looked at, and a version that is held for its evaluation.
LOOK_S, EVAL_LOOK_S = 0.05, 0.2


class Ends:
    """Of one engine. Every wait is named, and over when the engine is lost."""

    def __init__(self, services: Services, waiting: Waiting, folders: Folders) -> None:
        self._services = services
        self._waiting = waiting
        self._folders = folders

    async def first(self, newest: Publication, out: Collection[str]) -> Publication | None:
        """one_step: an earlier version that has its folder, where a cohort is to be drawn under it (T5); else None.

        The disk may be slower than a step: then that of ``newest`` is there as soon as that of this one.

        Args:
            out: publications that will not do (VERSION-REV).
        """
        engine = self._services.engine
        if engine.version < 0 or engine.offloaded or not self._services.config.staleness.rules.drains:
            return None
        oldest = min(await self._cohorts(), default=newest.version)
        if not engine.version < oldest < newest.version:
            return None
        return await self._folders.earliest(oldest, newest, out)

    async def wait(self, newest: Publication) -> None:
        """Wait until ``newest`` may be loaded; the engine goes on meanwhile."""
        engine = self._services.engine
        if engine.version < 0 or engine.offloaded:
            return
        if newest.abandons(engine.version):
            return  # what would be drawn under a version that no longer lives could not be trained (T1)
        if self._services.config.staleness.rules.drains:
            await self._cohort_ends(newest)
        if self._services.config.data.eval_pinned:
            await self._evaluation_ends(newest, engine.version)

    async def _cohort_ends(self, newest: Publication) -> None:
        """one_step: what was admitted under an older version is drawn under it, wherever it runs (T5).

        A cohort that needs newer weights than the engine has is waited for while another engine may draw it. Where none
        may, its version was abandoned before anybody had it, say, and it is drawn under ``newest``.
        """
        engine = self._services.engine
        while True:
            older = [version for version in await self._cohorts() if version < newest.version]
            if any(v > engine.version for v in older):
                elsewhere = await self._elsewhere(newest.version)
                older = [v for v in older if v <= engine.version or any(v <= one for one in elsewhere)]
            if not older or self._services.engine_lost.is_set():
                return
            self._waiting.for_(f"the cohort admitted at version {min(older)} to end before version {newest.version}")
            await asyncio.sleep(LOOK_S)

    async def _cohorts(self) -> list[int]:
        """Versions under which jobs were admitted that are not done."""
        key = self._services.keys.cohorts
        return cohorts_in(await self._services.control.do(lambda client: client.hkeys(key)))

    async def _elsewhere(self, below: int) -> list[int]:
        """Versions below this one that other engines have, or are about to have."""
        services = self._services
        keys, model = services.keys, services.config.model.name
        there = parse_workers(await services.control.do(lambda client: client.hgetall(keys.workers)))
        loading = await services.control.do(lambda client: client.hgetall(keys.loading(model)))
        alive = {one.name: one.version for one in there if one.age_s <= FRESH_S and one.name != services.worker}
        found = list(alive.values())
        for worker, at, versions in loading_in(loading):
            # Said before its presence is: who has only just come counts too.
            if worker in alive or (worker != services.worker and time.time() - at < FRESH_S):
                found += versions
        return [version for version in found if version < below]

    async def _evaluation_ends(self, newest: Publication, loaded: int) -> None:
        """data.eval_pinned: what is asked of the version that is loaded is drawn before another one comes (T18)."""
        services = self._services
        keys = services.keys
        while not services.engine_lost.is_set():
            jobs, is_paused = await services.control.do(lambda client: _evaluating(client, keys))
            left = sum(_asked_version(job) == loaded for job in jobs)
            if not left or is_paused:
                return
            self._waiting.for_(
                f"the evaluation of version {loaded} ({left} prompts left) to end before version {newest.version} is "
                "loaded (data.eval_pinned)"
            )
            await asyncio.sleep(EVAL_LOOK_S)


async def _evaluating(client: AsyncClient, keys: Keys) -> tuple[list[bytes], bool]:
    """Evaluation's jobs that are not done, and whether their lane is paused: nobody draws them then."""
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.unfinished(Lane.EVAL), 0, -1)
    pipe.sismember(keys.paused, Lane.EVAL)
    try:
        jobs, is_paused = await pipe.execute()
    except Exception as exc:
        raise translate(exc, "evaluating") from exc
    return jobs, bool(is_paused)


def _asked_version(job: bytes) -> int:
    """Version that a job of an evaluation is asked of; -1 for one of somebody else's."""
    parts = job.rsplit(b"/", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else -1
