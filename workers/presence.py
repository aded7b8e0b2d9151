"""Publish the state of a worker in Redis, for users, the live view and the launcher."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping

from penstock.metrics.probes import ASKED, Responder
from penstock.protocol import scripts
from penstock.protocol.presence import WorkerPresence, WorkerState
from penstock.protocol.waits import MOMENT_S, Waiting
from penstock.records.codec import pack
from penstock.records.worker_causes import EngineSilent
from penstock.system.keeper import started_pid
from penstock.text import redact
from penstock.workers.jobs.held_job import HeldJob
from penstock.workers.services import Services
from penstock.workers.weights.loop import WeightLoop

log = logging.getLogger(__name__)

#: Half-life of a capacity measurement, in seconds with full slots.
HALF_S = 120.0
#: Least seconds with full slots before the rate is known.
LEAST_S = 10.0


class Capacity:
    """Measure a worker's tokens per second over its last minutes with full slots.

    The rate over all time is limited by the trainers' demand through the gate: a fleet that divided the demand by it
    would grow without bound.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        #: Seconds with full slots so far, up to ``LEAST_S``.
        self._known_s = 0.0

    def add(self, seconds: float, tokens: float, *, full: bool) -> None:
        """Add a measurement of ``tokens`` in the last ``seconds``; ``full``: all slots were in use throughout."""
        if not full or seconds <= 0:
            return
        kept = 0.5 ** (seconds / HALF_S)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._known_s = min(LEAST_S, self._known_s + seconds)

    @property
    def tokens_per_s(self) -> float:
        """Measured rate; 0 while it is unknown."""
        return self._tokens / self._seconds if self._known_s >= LEAST_S else 0.0


PRESENCE_S = 0.5
#: Seconds between checks for a reachability request from `penstock doctor`.
PROBE_CHECK_S = 2.0
#: Tokens per second below which a worker counts as idle: a decayed mean never reaches 0.
IDLE_TOKENS_PER_S = 0.01
#: Longest attempt to remove the record on exit, in seconds; the leader removes remaining records.
END_S = 2.0


class Presence:
    """Publish the worker's presence record, with its waits, until cancelled."""

    def __init__(
        self,
        services: Services,
        updates: WeightLoop,
        *,
        waits: Mapping[str, Waiting],
        held: Mapping[str, HeldJob],
        draining: asyncio.Event,
        metrics_url: str,
        requests: Waiting,
        waiting: Callable[[str], Waiting],
    ) -> None:
        self._services = services
        self._updates = updates
        self._waits = waits
        self._held = held
        self._draining = draining
        self._metrics_url = metrics_url
        self._requests = requests
        self._waiting = waiting
        self._tokens_per_s = 0.0
        self._capacity = Capacity()
        self._was_full = False
        self._responder = Responder(services.config, services.worker)
        self._next_probe = 0.0

    async def run(self) -> None:
        """Publish the worker's state twice a second; never returns."""
        before, at = 0, time.monotonic()
        while True:
            self._services.show.clear()
            await self._services.commits.refresh()
            await self._write(pack(self.presence().to_record()))
            await self._services.send_outcomes()
            self._report_silence()
            self._report_open_calls()
            await self._answer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_S):
                    await self._services.show.wait()
            now = time.monotonic()
            tokens = self._services.tally.generated_tokens
            rate = (tokens - before) / (now - at)
            self._measure_capacity(now - at, tokens - before)
            before, at = tokens, now
            self._tokens_per_s = smoothed(self._tokens_per_s, rate)

    def _measure_capacity(self, seconds: float, tokens: int) -> None:
        full = self._services.num_running >= self._services.config.worker.slots
        self._capacity.add(seconds, tokens, full=full and self._was_full)
        self._was_full = full

    def _report_silence(self) -> None:
        """Report a request that hangs (I8), long before its timeout."""
        silent = self._services.engine.silent()
        if not silent:
            self._requests.end()
            return
        rid, seconds = silent[0]
        self._requests.blocked_on(EngineSilent(rid, seconds, len(silent) - 1))

    def _report_open_calls(self) -> None:
        """Report slow calls of services and user code (I8)."""
        for kind, question in self._services.open_calls.open().items():
            if question is not None and time.time() - question.since_s >= MOMENT_S:
                self._waiting(kind).blocked_on(question.cause, question.since_s)
            else:
                self._waiting(kind).end()

    async def _answer(self) -> None:
        """Report reachable parts if ``penstock doctor`` requested it."""
        if time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + PROBE_CHECK_S
        key = self._services.keys.looks
        self._responder.received(await self._services.control.do(lambda client: client.hget(key, ASKED)))

    async def end(self) -> None:
        """Remove the record; log and ignore an unavailable Redis."""
        try:
            async with asyncio.timeout(END_S):
                await self._services.send_outcomes()
                await self._write(b"")
        except Exception as exc:
            log.warning("failed to remove the presence record: %r", exc)

    async def _write(self, record: bytes) -> None:
        services = self._services
        await services.control.call(scripts.note(services.keys, services.keys.workers, services.worker, record))

    @property
    def state(self) -> WorkerState:
        """State of the worker; the most specific one that applies."""
        engine = self._services.engine
        if self._draining.is_set():
            return WorkerState.DRAINING
        if self._services.crash_loop:
            return WorkerState.CRASH_LOOP
        if self._services.engine_lost.is_set():
            away = engine.config.url is not None or engine.is_away
            return WorkerState.ENGINE_AWAY if away else WorkerState.RESTARTING_ENGINE
        if engine.offloaded:
            return WorkerState.OFFLOADED
        if engine.version < 0:
            return WorkerState.NO_WEIGHTS if engine.info.version else WorkerState.STARTING
        return WorkerState.CANNOT_LOAD if self._updates.cannot_load else WorkerState.SERVING

    def presence(self) -> WorkerPresence:
        """Return the current presence record."""
        services, engine, tally = self._services, self._services.engine, self._services.tally
        return WorkerPresence(
            name=services.worker,
            at=time.time(),
            host=socket.gethostname(),
            pid=started_pid(),
            engine=f"sglang {engine.info.version}".strip() + (" (external)" if engine.config.url else ""),
            engine_pid=engine.pid or 0,
            url=redact(engine.url),
            agents_url=services.agents_url,
            version=engine.version,
            state=self.state,
            held=len(self._held),
            running=services.num_running,
            slots=services.config.worker.slots,
            tokens_per_s=self._tokens_per_s,
            capacity_tokens_per_s=self._capacity.tokens_per_s,
            open_samples=sum(held.num_open for held in self._held.values()),
            generated_tokens=tally.generated_tokens,
            samples=tally.committed_samples,
            groups=tally.committed_groups,
            failed=tally.failed_jobs,
            lost_leases=tally.lost_leases,
            servers_seen=services.commits.servers_seen,
            engine_restarts=tally.engine_restarts,
            external=engine.config.url is not None,
            why=services.crash_loop or self._updates.cannot_load or self._updates.memory.cannot_offload,
            ranks=engine.info.num_ranks,
            layout=self._updates.transfers.layout,
            awaits=self._updates.awaits,
            offloaded=sorted(engine.offloaded),
            unwatched=self._updates.memory.wish.unwatched,
            revived_at=self._updates.memory.revived_at,
            metrics=self._metrics_url,
            engines=engine.describe(),
            gpus=list(services.gpus()),
            waits=[{"task": task, **record} for task, one in self._waits.items() if (record := one.record())],
        )


def smoothed(mean: float, rate: float) -> float:
    """Update the moving average of a rate with one measurement; return 0 for an idle worker."""
    mean = 0.7 * mean + 0.3 * rate
    return mean if mean >= IDLE_TOKENS_PER_S else 0.0
