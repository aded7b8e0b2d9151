"""A rollout worker: one engine, fed from the queue by pulling.

| task | waits for | unblocked by |
|---|---|---|
| intake | a free slot, a job its engine may start | a sample that ends; the list `wake` |
| jobs | slot, engine, reward, Redis | see held_job.py |
| heartbeat | time | - |
| weights | a publication; running samples (drain); the cohort (one_step) | the stream `weights:MODEL` |
| engine | the engine's death | its restart with the newest publication (I9) |
| presence | time | - |

The first task to die takes the process down with its reason; leases and prefixes then outlive it. SIGTERM drains:
no new lease, running samples may end for ``worker.drain_timeout_s``, then prefixes are kept and jobs handed back.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

from penstock import scripts
from penstock.config import Config
from penstock.connect import connect
from penstock.control import AsyncControl
from penstock.errors import ConfigError, EngineDied, EngineError, PublishError
from penstock.keys import LANES, Keys
from penstock.messages import pack
from penstock.scripts import ensure_lanes
from penstock.tokens import new_token
from penstock.waits import Waiting
from workers.commits import Commits
from workers.engine import Engine
from workers.gate import Gate
from workers.held_job import HeldJob
from workers.rewards import Rewards
from workers.services import Services
from workers.stops import Tokenizer
from workers.updates import Updates

log = logging.getLogger(__name__)

#: Longest sleep on the list of wake-ups: a wake-up that another worker took costs at most so long.
WAKE_S = 1.0
PRESENCE_S = 0.5
#: Restarts of an engine in a row, none of which lived so long, until the worker gives up.
MAX_RESTARTS, SETTLED_S = 5, 60.0
#: Longest wait for samples to be handed back.
HAND_BACK_S = 15.0


class Worker:
    """One worker process. ``run`` returns after ``drain``, or raises what killed a task."""

    def __init__(self, config: Config, name: str) -> None:
        if config.redis.url is None:
            raise ConfigError("The worker needs redis.url: the address of the run's Redis.")
        self.config = config
        self.keys = Keys(config.run)
        # Unique for ever, or a successor of this name would be taken for it.
        self.name = f"{name}.{new_token()[:8]}"
        self._waits: dict[str, Waiting] = {}
        self._setup(config.redis.url)
        self.control = AsyncControl(config.redis.url)
        self._reader = AsyncControl(config.redis.url, block_s=2.0)
        self._waker = AsyncControl(config.redis.url, block_s=2.0)
        log_dir = config.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        engine = Engine(config.engine, config.model, name=name, log_dir=log_dir)
        self.services = Services(
            config=config,
            keys=self.keys,
            worker=self.name,
            control=self.control,
            engine=engine,
            gate=Gate(),
            rewards=Rewards(config.reward),
            tokenizer=load_tokenizer(config.model.path),
            commits=Commits(config, self.keys, self.control, self._waiting("commit"), self.name),
            slots=asyncio.Semaphore(config.worker.slots),
        )
        self.updates = Updates(self.services, self._reader, self._waiting("weights"))
        self._held: dict[str, HeldJob] = {}
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._state = "starting"
        self._tokens_per_s = 0.0

    def _setup(self, url: str) -> None:
        # Blocking clients of the start: a check of the server, the lanes, and small writes of named waits.
        self._sync = connect(url)
        ensure_lanes(self._sync, self.keys)

    def _waiting(self, what: str) -> Waiting:
        if what not in self._waits:
            self._waits[what] = Waiting(self._sync, self.keys, f"worker:{self.name}:{what}")
        return self._waits[what]

    def drain(self) -> None:
        """Finish and leave; a second call hands back at once what still runs. Safe in a signal handler of the loop."""
        if self._draining.is_set():
            self._hurry.set()
            return
        log.info("draining: %d jobs are held", len(self._held))
        self._draining.set()

    async def run(self) -> None:
        """Work until ``drain``. Blocks."""
        tasks = {
            asyncio.create_task(work, name=name)
            for name, work in (
                ("presence", self._presence()),
                ("heartbeat", self._heartbeat()),
                ("serve", self._serve()),
            )
        }
        stop = asyncio.create_task(self._draining.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
            await self._finish()
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)
            await self._close()

    async def _serve(self) -> None:
        """Start the engine with the current weights, then take jobs, updates and deaths as they come."""
        await self._start_engine()
        work: list[Coroutine[Any, Any, None]] = [self._intake(), self.updates.run(), self._watch_engine()]
        async with asyncio.TaskGroup() as group:
            for name, task in zip(("intake", "weights", "engine"), work, strict=True):
                group.create_task(task, name=name)

    # --- jobs -----------------------------------------------------------------------------------------------------

    async def _intake(self) -> None:
        """Lease as much as fits, sleep on `wake` when there is nothing."""
        waiting = self._waiting("intake")
        losses = self.control.losses
        while not self._draining.is_set():
            if losses != self.control.losses:
                losses = self.control.losses
                await self._sweep_own()
            took = await self._lease()
            if took:
                waiting.end()
                continue
            waiting.for_(self._why_idle())
            if self._has_room():
                await self._waker.do(lambda client: client.blpop([self.keys.wake], timeout=WAKE_S))
            else:
                await asyncio.sleep(0.005)

    def _has_room(self) -> bool:
        services = self.services
        return (
            services.num_generating < self.config.worker.slots
            and len(self._held) < 4 * self.config.worker.slots
            and services.engine.version >= 0
            and not services.engine_lost.is_set()
        )

    def _why_idle(self) -> str:
        engine = self.services.engine
        if self.services.engine_lost.is_set():
            return "its engine to be restarted"
        if engine.version < 0:
            return f"the first publication of model {self.config.model.name}, by the trainer"
        if self.services.gate.reason:
            return self.services.gate.reason
        if self._held:
            return ""
        return f"jobs that an engine of version {engine.version} may start, from the producer"

    async def _lease(self) -> int:
        if not self._has_room():
            return 0
        suspects = sum(1 for held in self._held.values() if held.lease.lane == "suspect")
        free = self.config.worker.slots - self.services.num_generating
        leases = await self.control.call(
            scripts.lease(
                self.keys,
                self.name,
                new_token(),
                most=max(1, free // self.config.rollout.n),
                version=self.services.engine.version,
                suspects=max(0, 1 - suspects),
            )
        )
        for lease in leases:
            held = HeldJob(self.services, lease)
            self._held[lease.job] = held
            held.start().add_done_callback(partial(self._forget, held))
        # Samples register themselves when their tasks first run.
        await asyncio.sleep(0)
        return len(leases)

    def _forget(self, held: HeldJob, _: "asyncio.Task[None]") -> None:
        if self._held.get(held.job) is held:
            del self._held[held.job]

    async def _sweep_own(self) -> None:
        """A lease whose reply was lost belongs to us without our knowing: hand it back."""
        for lane in LANES:
            found = await self.control.call(scripts.abandon(self.keys, lane, self.name, list(self._held)))
            for job in found:
                log.warning("the lease of job %s came back to the queue: its reply was lost", job)

    async def _heartbeat(self) -> None:
        while True:
            leases = [(job, held.lease.token) for job, held in self._held.items()]
            if leases:
                for job in await self.control.call(scripts.renew(self.keys, self.name, leases)):
                    held = self._held.get(job)
                    # A commit on its way may have ended the lease by itself; its answer tells, or the next beat.
                    if held is not None and (job, held.lease.token) in leases and not held.is_committing:
                        held.lose()
            await asyncio.sleep(self.config.worker.heartbeat_s)

    # --- engine ---------------------------------------------------------------------------------------------------

    async def _start_engine(self) -> None:
        """Weights before work (I9): the newest publication, if there is one."""
        waiting = self._waiting("engine")
        waiting.for_("its engine to start")
        newest = await self.updates.look()
        try:
            await self.services.engine.start(newest)
        except PublishError as exc:
            log.error("version %d cannot be loaded, waiting for another: %s", newest.version if newest else 0, exc)
            await self.services.engine.start(None)
        waiting.end()
        engine = self.services.engine
        log.info("SGLang %s at %s, version %d", engine.server_version, engine.url, engine.version)

    async def _watch_engine(self) -> None:
        """Restart the engine whenever it dies; give up when it keeps dying."""
        restarts = 0
        while True:
            born = time.monotonic()
            reason = await self._engine_death()
            restarts = restarts + 1 if time.monotonic() - born < SETTLED_S else 1
            if restarts > MAX_RESTARTS:
                raise EngineDied(f"The engine died {restarts} times in a row; the last time: {reason}")
            log.error("engine lost: %s", reason)
            self.services.tally.engine_restarts += 1
            with self.services.gate.requests.held("the engine is being restarted"):
                self.services.engine_lost.set()
                await self._restart_engine(restarts)
                self.services.engine_lost.clear()

    async def _engine_death(self) -> str:
        watch = asyncio.create_task(self.services.engine.watch())
        seen = asyncio.create_task(self.services.engine_lost.wait())
        try:
            done, _ = await asyncio.wait({watch, seen}, return_when=asyncio.FIRST_COMPLETED)
            return watch.result() if watch in done else "a request found it dead"
        finally:
            for task in (watch, seen):
                task.cancel()
            await asyncio.gather(watch, seen, return_exceptions=True)

    async def _restart_engine(self, restarts: int) -> None:
        waiting = self._waiting("engine")
        while True:
            waiting.for_("its engine to be restarted")
            try:
                await self.services.engine.stop()
                await self._start_engine()
                return
            except EngineError as exc:
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise
                log.error("the engine did not start, trying again: %s", exc)
                await asyncio.sleep(min(30.0, 2.0**restarts))

    # --- presence and end -----------------------------------------------------------------------------------------

    async def _presence(self) -> None:
        before, at = 0, time.monotonic()
        while True:
            await asyncio.sleep(PRESENCE_S)
            now = time.monotonic()
            tokens = self.services.tally.generated_tokens
            rate = (tokens - before) / (now - at)
            before, at = tokens, now
            self._tokens_per_s = 0.7 * self._tokens_per_s + 0.3 * rate
            for waiting in self._waits.values():
                waiting.tick()
            await self._show()

    async def _show(self) -> None:
        engine, tally = self.services.engine, self.services.tally
        if self._draining.is_set():
            self._state = "draining"
        elif self.services.engine_lost.is_set():
            self._state = "restarting engine"
        elif engine.version < 0:
            self._state = "no weights" if engine.server_version else "starting"
        else:
            self._state = "cannot load" if self.updates.cannot_load else "serving"
        record = {
            "name": self.name,
            "at": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "engine": f"sglang {engine.server_version}".strip(),
            "engine_pid": engine.pid or 0,
            "url": engine.url,
            "version": engine.version,
            "state": self._state,
            "held": len(self._held),
            "running": self.services.num_generating,
            "slots": self.config.worker.slots,
            "tokens_per_s": self._tokens_per_s,
            "generated_tokens": tally.generated_tokens,
            "samples": tally.committed_samples,
            "groups": tally.committed_groups,
            "failed": tally.failed_jobs,
            "lost_leases": tally.lost_leases,
            "engine_restarts": tally.engine_restarts,
            "why": self.updates.cannot_load,
        }
        await self.control.do(lambda client: client.hset(self.keys.workers, self.name, pack(record)))

    async def _finish(self) -> None:
        """Let what runs end, then hand the rest back with its prefixes."""
        tasks = [held.task for held in self._held.values() if held.task is not None]
        if not tasks:
            return
        ended = asyncio.create_task(asyncio.wait(tasks))
        hurry = asyncio.create_task(self._hurry.wait())
        timeout = self.config.worker.drain_timeout_s
        await asyncio.wait({ended, hurry}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for held in list(self._held.values()):
            held.release()
        await asyncio.wait({ended}, timeout=HAND_BACK_S)
        hurry.cancel()

    async def _close(self) -> None:
        await self.services.engine.stop()
        await self.services.rewards.close()
        for waiting in self._waits.values():
            waiting.end()
        try:
            await asyncio.wait_for(self.control.client.hdel(self.keys.workers, self.name), 2.0)
        except Exception as exc:
            log.warning("presence could not be removed: %s", exc)
        await self.services.commits.close()
        for control in (self.control, self._reader, self._waker):
            await control.close()
        self._sync.close()


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a model's folder; raises ConfigError. Reads local files only."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {path} holds no tokenizer that can be read: {exc}") from exc
    return cast(Tokenizer, tokenizer)


async def _run(config: Config, name: str) -> None:
    worker = Worker(config, name)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    try:
        await worker.run()
    except* (ConfigError, EngineError) as group:
        # One sentence instead of a tree of tasks.
        raise group.exceptions[0] from None


def main(config: Config, name: str) -> int:
    """Run one worker until SIGTERM or SIGINT. Blocks."""
    asyncio.run(_run(config, name))
    return 0
