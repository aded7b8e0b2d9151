"""Apply a publication of weights to a running engine.

| policy   | running requests                                        | KV of running requests           |
|----------|---------------------------------------------------------|----------------------------------|
| in_place | frozen, continue after the load                         | of the old weights, continued    |
| abort    | return early; their samples resume after the load       | recomputed with the new weights  |
| drain    | samples end first, turns and environment included       | never mixed                      |

Under every policy the publication is verified before the engine is touched, and no request is sent while the weights
load. The prefix cache is not flushed: a flush takes longer than a load, kills a server that is not idle, and is useless
because each load has its own cache namespace. A publication of the weights that the engine has is adopted, not loaded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from penstock.errors import EngineDied, EngineError, PublishError
from penstock.records.publication import Publication
from penstock.records.worker_causes import VersionDraining, VersionLoading
from penstock.workers.engine import ABORT_AGAIN_S, Engine, NotBegun, Partial, Receive
from penstock.workers.jobs.valves import Valves

log = logging.getLogger(__name__)

Policy = Literal["in_place", "abort", "drain"]
T = TypeVar("T")
#: Agrees with the trainer on a transfer; returns None if it sends nothing to this engine.
Prepare: TypeAlias = Callable[[Publication], Awaitable[Receive | None]]


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """Cost of an update."""

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


class Updater:
    """Change the weights of one engine. One change at a time, and none beside a start of the engine.

    A cancellation during a change waits for its end, so that ``engine.version`` is always what the server has.

    Args:
        prepare: for weights that the trainer may send.
    """

    def __init__(self, engine: Engine, valves: Valves, prepare: Prepare | None = None) -> None:
        self._engine, self._valves, self._prepare = engine, valves, prepare
        #: Keeps an engine with partly received weights from generating.
        self._mixed, self._mixed_since = ExitStack(), 0.0

    def reset(self) -> None:
        """Record that the engine is replaced by a new one, whose weights are complete."""
        self._mixed.close()

    async def apply(self, publication: Publication, policy: Policy, *, is_sent: bool = False) -> ApplyReport:
        """Load a publication. Blocks until it is loaded; ``drain`` blocks for the running samples.

        Args:
            is_sent: receive it from the trainer if that sends it to this engine; else from its folder.

        Raises:
            PublishError: the version is not newer, incomplete, does not fit the model, or the engine refused it; the
                engine serves the old weights.
            NotBegun: the weights were not sent to this engine and have no folder yet.
            Partial: they were sent in part: :meth:`complete` has to follow, or a new engine.
            EngineDied: the engine was lost; restart it with a publication.
        """
        engine, samples = self._engine, self._valves.samples
        async with self._valves.applying:
            _refuse_backwards(engine, publication)
            if not is_sent:
                await engine.verify(publication)
            elif publication.is_whole:
                await engine.verify(publication, files=False)
            if policy != "drain":
                return await self._receive_or_load(publication, policy, is_sent, 0.0)
            started = time.perf_counter()
            with samples.held(VersionDraining(publication.version)):
                await samples.empty()
                waited = time.perf_counter() - started
                return await self._receive_or_load(publication, policy, is_sent, waited)

    async def complete(self, publication: Publication) -> ApplyReport:
        """Load a folder into an engine with partly received weights.

        Raises:
            EngineDied: it was lost, or the folder cannot be loaded: its weights stay mixed.
        """
        async with self._valves.applying:
            try:
                await self._engine.verify(publication)
                report = await _to_the_end(self._complete(publication))
            except PublishError as exc:
                raise EngineDied(f"the engine's weights are mixed and cannot be restored; restart it: {exc}") from exc
            self._mixed.close()
            return report

    async def adopt(self, publication: Publication) -> bool:
        """Make the engine take the number of a publication whose weights it has. Blocks for a few round trips.

        Returns:
            False: its server cannot change its number.

        Raises:
            EngineDied: the engine was lost, or has other weights than were loaded into it.
        """
        async with self._valves.applying:
            _refuse_backwards(self._engine, publication)
            try:
                await _shielded(self._engine.adopt(publication))
            except EngineDied:
                raise
            except EngineError as exc:
                log.warning("version %d is loaded, though the engine has its weights: %s", publication.version, exc)
                return False
        log.info("version %d has the weights that are loaded: the engine took its number", publication.version)
        return True

    async def _receive_or_load(
        self, publication: Publication, policy: Policy, is_sent: bool, waited: float
    ) -> ApplyReport:
        if is_sent and self._prepare is not None:
            receive = await self._prepare(publication)
            if receive is not None:
                try:
                    return await _to_the_end(self._load(publication, policy, waited, receive))
                except NotBegun:
                    if not publication.is_whole:
                        raise
            elif not publication.is_whole:
                raise NotBegun(f"version {publication.version} was not sent to this engine, and has no folder yet")
            await self._engine.verify(publication)
        return await _to_the_end(self._load(publication, policy, waited))

    async def _load(
        self, publication: Publication, policy: Policy, waited: float, receive: Receive | None = None
    ) -> ApplyReport:
        engine, is_frozen = self._engine, policy == "in_place"
        with ExitStack() as hold:
            hold.enter_context(self._valves.requests.held(VersionLoading(publication.version)))
            hold.enter_context(engine.unwatched())
            started, aborted = time.perf_counter(), engine.num_aborted
            if is_frozen:
                await engine.pause()
            else:
                await return_all(engine, self._valves)
            returned, num_aborted = time.perf_counter(), engine.num_aborted - aborted
            try:
                load_s = await engine.load(publication, receive)
            except Partial:
                self._mixed, self._mixed_since = hold.pop_all(), started
                raise
            except PublishError:
                if is_frozen:
                    await engine.resume()
                raise
            if is_frozen:
                await engine.resume()
            pause_s = time.perf_counter() - started
        wait_s = waited if policy == "drain" else returned - started if policy == "abort" else 0.0
        return ApplyReport(publication.version, policy, pause_s, load_s, wait_s, num_aborted)

    async def _complete(self, publication: Publication) -> ApplyReport:
        load_s = await self._engine.load(publication)
        if self._engine.paused:
            await self._engine.resume()
        pause_s = time.perf_counter() - self._mixed_since
        return ApplyReport(publication.version, "in_place", pause_s, load_s, 0.0, 0)


def _refuse_backwards(engine: Engine, publication: Publication) -> None:
    new, old = (publication.version, publication.rev), (engine.version, engine.rev)
    if new <= old:
        raise PublishError(
            f"version {new[0]} (rev {new[1]}) does not come after {old[0]} (rev {old[1]}), which engine {engine.name} "
            "has loaded: versions never go back; publish under the next number."
        )


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
    try:
        return await _shielded(change)
    except EngineDied:
        raise
    except EngineError as exc:
        # Whether it is paused, and which weights it has, is unknown.
        raise EngineDied(f"the engine failed during an update of weights: {exc}") from exc


async def _shielded(change: Coroutine[Any, Any, T]) -> T:
    """Wait for a change of an engine; a cancellation waits for its end."""
    task = asyncio.create_task(change)
    try:
        return await asyncio.shield(task)
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
