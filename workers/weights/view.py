"""Read the view that versions are selected by.

The order of the reads is publications, folders, cohorts, other workers. A job moves on while they are read: it is
admitted after its version was announced, and ends after an engine generated it. So a cohort that is seen here has its
publication in the view, and a worker that takes its version afterwards is seen as well.
"""

import time
from collections.abc import Iterable
from typing import Any

from penstock.config.staleness import Mode
from penstock.errors import ProtocolError
from penstock.names import Lane
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState, parse_workers
from penstock.protocol.scripts import cohorts_in, loading_in, translate, whole_of
from penstock.records.publication import Publication
from penstock.redis.commands import AsyncClient
from penstock.workers.services import Services
from penstock.workers.weights.select import EngineView, OtherEngine, Purpose, View

#: Publications that are read: the newest, and those before it.
NUM_PUBLISHED = 17
#: Longest time from the end of a lease to its job being taken over.
TAKEN_OVER_S = 2.0


class ViewReader:
    """Read views for one worker."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._model = services.config.model.name
        #: The stream of publications, and the id of its newest entry.
        self.key, self.last = services.keys.weights(self._model), "0-0"
        #: The newest publication.
        self.newest: Publication | None = None
        #: Why the newest entry, or the record of its folder, cannot be read; '': it can.
        self.malformed = ""
        #: Publications that engines crashed on -> last error.
        self.set_aside: dict[str, str] = {}

    async def read(self, purpose: Purpose, loaded: Publication | None = None) -> View:
        """Read a view. Blocks for two round trips.

        Args:
            loaded: what the engine has, or had when it was lost.
        """
        services = self._services
        entries = await services.control.do(lambda client: client.xrevrange(self.key, count=NUM_PUBLISHED))
        self.malformed, self.last = "", entries[0][0].decode() if entries else "0-0"
        published = list(self._parsed(entries))
        self.newest = published[0] if published else None
        engine, config = services.engine, services.config
        known = [*published, *([loaded] if loaded is not None else [])]
        found = await services.control.do(lambda client: self._answers(client, known))
        known = list(self._with_folders(known, found[0]))
        self.set_aside = {
            name.decode(errors="replace"): text.decode(errors="replace") for name, text in found[1].items()
        }
        is_async = config.staleness.mode is Mode.ASYNC
        return View(
            purpose=purpose,
            engine=EngineView(engine.version, engine.rev, frozenset(engine.offloaded), services.engine_lost.is_set()),
            loaded=None if loaded is None else known[-1],
            published=tuple(known[: len(published)]),
            set_aside=frozenset(self.set_aside),
            drains=config.staleness.rules.drains,
            bound=config.staleness.bound if is_async else 0,
            cohorts=tuple(sorted(cohorts_in(found[2]))),
            others=self._others(found[3], found[4]),
            evaluating=0 if found[6] else sum(_asked_version(job) == engine.version for job in found[5]),
        )

    async def _answers(self, client: AsyncClient, known: list[Publication]) -> list[Any]:
        services, keys, model = self._services, self._services.keys, self._model
        drains = services.config.staleness.rules.drains
        is_pinned = services.config.data.eval_pinned and services.engine.version >= 0
        pipe = client.pipeline(transaction=False)
        pipe.hmget(keys.whole(model), ["", *(str(one.version) for one in known if not one.is_whole)])
        pipe.hgetall(keys.aside(model))
        if drains:
            pipe.hkeys(keys.cohorts)
            pipe.hgetall(keys.workers)
            pipe.hgetall(keys.loading(model))
        if is_pinned:
            pipe.zrange(keys.unfinished(Lane.EVAL), 0, -1)
            pipe.sismember(keys.paused, Lane.EVAL)
        try:
            answers = await pipe.execute()
        except Exception as exc:
            raise translate(exc, "weights") from exc
        return answers[:2] + (answers[2:5] if drains else [[], {}, {}]) + (answers[-2:] if is_pinned else [[], 1])

    def _parsed(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> Iterable[Publication]:
        """Parse publications, newest first; malformed ones are skipped."""
        for at, (entry, fields) in enumerate(entries):
            try:
                yield Publication.from_bytes(fields.get(b"p", b""), f"publication {entry.decode()}")
            except ProtocolError as exc:
                if at == 0:
                    self.malformed = str(exc)

    def _with_folders(self, known: list[Publication], records: list[bytes | None]) -> Iterable[Publication]:
        """Add the folders that were completed after the announcement; a malformed record counts as none."""
        rest = iter(records[1:])
        for one in known:
            data = None if one.is_whole else next(rest)
            try:
                yield one if data is None else whole_of(data, one.version, one.model).of_publication(one)
            except ProtocolError as exc:
                if one is known[0]:
                    self.malformed = str(exc)
                yield one

    def _others(self, workers: dict[bytes, bytes], loading: dict[bytes, bytes]) -> tuple[OtherEngine, ...]:
        """Return the other workers that generate.

        A stalled worker counts while its leases are valid: it may resume and commit. Workers without an engine, or with
        a wrong clock, are ignored: they may never come back.
        """
        silent_s, now = max(FRESH_S, self._services.config.worker.lease_s + TAKEN_OVER_S), time.time()
        loads = {worker: tuple(versions) for worker, _, versions in loading_in(loading)}
        return tuple(
            OtherEngine(one.version, tuple(v for v in loads.get(one.name, ()) if v > one.version))
            for one in parse_workers(workers)
            if one.name != self._services.worker and abs(now - one.at) <= silent_s and _is_generating(one)
        )


def _is_generating(one: WorkerPresence) -> bool:
    """Return whether a worker generates, or finishes what it holds."""
    serves = one.state in (WorkerState.SERVING, WorkerState.CANNOT_LOAD)
    return one.version >= 0 and (serves or (one.state == WorkerState.DRAINING and one.held > 0))


def _asked_version(job: bytes) -> int:
    """Return the version that an evaluation's job asks for; -1 for jobs of other programs."""
    parts = job.rsplit(b"/", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else -1
