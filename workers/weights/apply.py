"""Apply a publication of weights to a running engine.

| policy   | running requests                                        | KV of running requests           |
|----------|---------------------------------------------------------|----------------------------------|
| in_place | frozen, continue after the load                         | of the old weights, continued    |
| abort    | return early; their samples resume after the load       | recomputed with the new weights  |
| drain    | samples end first, turns and environment included       | never mixed                      |

Under every policy the publication is verified before the engine is touched, and no request is sent while the weights
load. The prefix cache is not flushed: a flush takes longer than a load, kills a server that is not idle, and is useless
because each load has its own cache namespace.

A publication of the weights that the engine already has is adopted, not loaded (:class:`Adoption`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from penstock.errors import EngineDied, EngineError, PublishError
from penstock.records.causes import VersionDraining, VersionLoading
from penstock.records.publication import Publication
from penstock.workers.engine import ABORT_AGAIN_S, Engine
from penstock.workers.jobs.valves import Valves
from penstock.workers.services import Services
from penstock.workers.weights.folders import Folders, FolderToCome
from penstock.workers.weights.receive.transfers import Transfers

log = logging.getLogger(__name__)


class Adoption:
    """Make one engine adopt publications of the weights that it already has; nothing is verified or loaded.

    These are ticks, the first publication of a restored trainer, and steps that changed nothing. Requests continue
    under every policy, and find the prefixes that were cached before. Two publications have the same weights if the
    digests of their indexes are equal; the engine still has the loaded weights if its server reports their version.
    """

    def __init__(self, services: Services, folders: Folders) -> None:
        self._services = services
        self._folders = folders
        #: Folder on this machine that the engine's weights were loaded from, if that is not the announced one; else ''.
        self._local_path = ""

    def note_loaded(self, publication: Publication, here: Publication) -> None:
        """Record what the engine has; ``here``: with its folder on this machine."""
        self._local_path = here.path if here.path != publication.path else ""

    def with_folder(self, publication: Publication) -> Publication:
        """Return a publication of the weights that the engine has, with its folder on this machine."""
        return replace(publication, path=self._local_path or publication.path)

    async def is_due(self, publication: Publication, loaded: Publication | None) -> bool:
        """Return whether ``publication`` is newer and proven to have the engine's weights. Blocks for a round trip.

        False if a rewind abandoned the engine's version: its running requests must not continue (T1).

        Args:
            loaded: what the engine has, or had when it was lost.
        """
        engine = self._services.engine
        if loaded is None or (engine.version, engine.rev) != (loaded.version, loaded.rev) or not publication.index:
            return False
        if publication.version <= engine.version or publication.abandons(engine.version):
            return False
        if engine.offloaded or engine.is_receiving:
            return False
        found = await self._folders.there(loaded)
        return found is not None and found.index == publication.index

    async def take(self, publication: Publication, loaded: Publication | None) -> bool:
        """Make the engine adopt a publication that is due. Blocks for a few round trips.

        A cancellation waits for the end of the change, so that ``engine.version`` is what the server reports.

        Args:
            publication: with its folder on this machine; the engines of a router that join later load that.
            loaded: as of :meth:`is_due`.

        Returns:
            False: it has to be loaded; the engine has other weights, or its server cannot change its number.

        Raises:
            EngineDied: the engine was lost, or has other weights than were loaded into it.
        """
        services = self._services
        async with services.valves.applying:
            if services.engine_lost.is_set() or not await self.is_due(publication, loaded):
                return False
            task = asyncio.create_task(services.engine.adopt(publication))
            try:
                await asyncio.shield(task)
            except EngineDied:
                raise
            except EngineError as exc:
                log.warning("version %d is loaded, though the engine has its weights: %s", publication.version, exc)
                return False
            except asyncio.CancelledError:
                await asyncio.wait({task})
                raise
        log.info("version %d has the weights that are loaded: the engine took its number", publication.version)
        return True


Policy = Literal["in_place", "abort", "drain"]
T = TypeVar("T")
#: Loads into a paused or idle engine; returns the seconds it took.
Load: TypeAlias = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """Cost of an update."""

    #: Version that was loaded: the publication's, or a later one if the transfer failed halfway.
    version: int
    policy: Policy
    #: Seconds without generation.
    pause_s: float
    #: Seconds the engine took to load; part of ``pause_s``.
    load_s: float
    #: Seconds of waiting for running samples (drain), or for aborted requests to return (abort).
    wait_s: float
    #: Requests that were aborted and resume.
    num_aborted: int


async def apply_publication(
    engine: Engine, valves: Valves, publication: Publication, policy: Policy, transfers: Transfers | None = None
) -> ApplyReport:
    """Load ``publication`` into ``engine``. Blocks until it is loaded; ``drain`` blocks for the running samples.

    A cancellation during the change waits for its end, so that ``engine.version`` is always the loaded version.

    Raises:
        PublishError: the version is not newer, incomplete, does not fit the model, or the engine refused it; the engine
            serves the old weights. FolderToCome: the weights were not sent to this engine and have no folder yet.
        EngineDied: the engine was lost; restart it with a publication.
    """
    async with valves.applying:
        _refuse_backwards(engine, publication)
        by_disk = transfers is None or not transfers.may_take(publication)
        if by_disk and not publication.is_whole:
            raise _to_come(publication)
        if by_disk:
            await engine.verify(publication)
        elif publication.is_whole:
            await engine.verify(publication, files=False)
        if policy == "drain":
            started = time.perf_counter()
            with valves.samples.held(VersionDraining(publication.version)):
                await valves.samples.empty()
                waited = time.perf_counter() - started
                load = await _prepare(engine, publication, None if by_disk else transfers)
                return await _to_the_end(_load_idle(engine, valves, publication, policy, waited, load))
        load = await _prepare(engine, publication, None if by_disk else transfers)
        if policy == "abort":
            return await _to_the_end(_load_idle(engine, valves, publication, policy, 0.0, load))
        return await _to_the_end(_load_frozen(engine, valves, publication, load))


async def _prepare(engine: Engine, publication: Publication, transfers: Transfers | None) -> Load:
    """Return the call that loads the weights: by the transfer agreed with the trainer, or from the verified folder."""
    receive = await transfers.prepare(publication) if transfers is not None else None
    if receive is None:
        if not publication.is_whole:
            raise _to_come(publication)
        if transfers is not None:
            await engine.verify(publication)
        return lambda: engine.load(publication)
    return lambda: engine.load(publication, receive)


def _to_come(publication: Publication) -> FolderToCome:
    return FolderToCome(f"version {publication.version} was not sent to this engine, and its folder is still to come")


def _refuse_backwards(engine: Engine, publication: Publication) -> None:
    new, old = (publication.version, publication.rev), (engine.version, engine.rev)
    if new <= old:
        raise PublishError(
            f"version {new[0]} (rev {new[1]}) does not come after {old[0]} (rev {old[1]}), which engine {engine.name} "
            "has loaded: versions never go back; publish under the next number."
        )


async def _load_frozen(engine: Engine, valves: Valves, publication: Publication, load: Load) -> ApplyReport:
    with valves.requests.held(VersionLoading(publication.version)), engine.unwatched():
        started = time.perf_counter()
        await engine.pause()
        try:
            load_s = await load()
        except PublishError:
            await engine.resume()
            raise
        await engine.resume()
        return ApplyReport(engine.version, "in_place", time.perf_counter() - started, load_s, 0.0, 0)


async def _load_idle(
    engine: Engine, valves: Valves, publication: Publication, policy: Policy, waited: float, load: Load
) -> ApplyReport:
    with valves.requests.held(VersionLoading(publication.version)), engine.unwatched():
        started = time.perf_counter()
        before = engine.num_aborted
        await return_all(engine, valves)
        num_aborted = engine.num_aborted - before
        returned = time.perf_counter()
        load_s = await load()
        ended = time.perf_counter()
    wait_s = waited if policy == "drain" else returned - started
    return ApplyReport(engine.version, policy, ended - started, load_s, wait_s, num_aborted)


async def return_all(engine: Engine, valves: Valves) -> None:
    """Abort repeatedly until the engine has returned all requests."""
    limit = engine.config.health_timeout_s * engine.config.health_failures
    deadline = time.monotonic() + limit
    empty = asyncio.create_task(valves.requests.empty())
    try:
        while valves.requests.running:
            await engine.abort_all()
            await asyncio.wait({empty}, timeout=ABORT_AGAIN_S)
            if valves.requests.running and time.monotonic() > deadline:
                raise EngineDied(
                    f"engine {engine.name} did not return {valves.requests.running} aborted requests within "
                    f"{limit:g} s; restart it."
                )
    finally:
        empty.cancel()


async def _to_the_end(change: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(change)
    try:
        return await asyncio.shield(task)
    except EngineDied:
        raise
    except EngineError as exc:
        # Whether it is paused, and which weights it has, is unknown.
        raise EngineDied(f"the engine failed during an update of weights: {exc}") from exc
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def unless_lost(engine_lost: asyncio.Event, change: Coroutine[Any, Any, T]) -> T | None:
    """Wait for a change of an engine; None if the engine was lost first, and the change was cancelled."""
    lost, applying = asyncio.create_task(engine_lost.wait()), asyncio.create_task(change)
    try:
        await asyncio.wait({applying, lost}, return_when=asyncio.FIRST_COMPLETED)
        return applying.result() if applying.done() else None
    finally:
        lost.cancel()
        applying.cancel()
        await asyncio.gather(applying, lost, return_exceptions=True)
