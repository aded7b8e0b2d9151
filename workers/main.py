"""A rollout worker: one engine, fed from the queue by pulling.

| task | waits for | unblocked by |
|---|---|---|
| intake | a free slot, a job its engine may start | a sample that ends; the list `wake` |
| jobs | slot, engine, reward, Redis | see jobs/held_job.py |
| heartbeat | time | - (see jobs/heartbeat.py: a thread renews the leases) |
| weights | a publication; running samples (drain); the cohort (one_step) | the stream `weights:MODEL` |
| engine | the engine's death | see caretaker.py: its restart with the newest publication (I9) |
| members | the list of a router's engines | `penstock fleet` |
| checks | verdicts of the verifier pool, with reward.pool.kind rq | see rewards/pool/client.py |
| presence | time | - |

The first task to die takes the process down with its reason. SIGTERM drains: no new lease, running samples may end for
``worker.drain_timeout_s``. Either way prefixes are kept then and jobs handed back without a charge; only a process that
is killed leaves its leases to run out.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError, QueueFull
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.scripts import ensure_lanes
from penstock.protocol.waits import Waiting
from penstock.redis.connect import connect
from penstock.redis.control import AsyncControl, Control
from penstock.system.tokens import new_token
from penstock.system.user_code import run_through, staying_alive
from penstock.weights.tokenizer import load_tokenizer
from workers.caretaker import Caretaker
from workers.jobs.commits import Commits
from workers.jobs.environments import Environments, allowed_environments
from workers.jobs.gate import Gate
from workers.jobs.heartbeat import Heartbeat, Lease
from workers.jobs.held_job import HeldJob
from workers.metrics import Metrics
from workers.presence import Presence
from workers.rewards.allowed import allowed_rewards
from workers.rewards.score import Rewards
from workers.router.choose import make_engine
from workers.router.members import follow_members
from workers.services import Services
from workers.weights.updates import Updates

if TYPE_CHECKING:
    from workers.rewards.pool.client import Checks


log = logging.getLogger(__name__)

#: Longest sleep on the list of wake-ups: a wake-up that another worker took costs at most so long.
WAKE_S = 1.0

#: Longest sleep until a slot or the engine is looked at.
LOOK_S = 0.1

#: Samples that may be drawn and not committed (rewards, a full Redis), in slots.
MAX_OPEN = 4

#: Longest wait for a note of a wait to be written.
NOTE_S = 1.0

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
        with contextlib.closing(Control(config.redis.url)) as control:
            control.do(lambda client: ensure_lanes(client, self.keys))
        # Named waits are small and rare; a Redis that hangs must not hang the loop for long.
        self._notes = connect(config.redis.url, timeout_s=NOTE_S, check=False)
        self._waits: dict[str, Waiting] = {}
        self.control = AsyncControl(config.redis.url)
        self._reader = AsyncControl(config.redis.url, block_s=2.0)
        self._waker = AsyncControl(config.redis.url, block_s=2.0)
        log_dir = config.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self.services = Services(
            config=config,
            keys=self.keys,
            worker=self.name,
            control=self.control,
            engine=make_engine(config, name, log_dir),
            gate=Gate(),
            # Before anything starts: what cannot be imported would fail every job of its dataset.
            rewards=Rewards(config.reward, self._checks(), allowed_rewards(config)),
            environments=Environments(allowed_environments(config)),
            tokenizer=load_tokenizer(config.model.path),
            commits=Commits(config, self.keys, self.control, self._waiting("commit"), self.name),
            slots=asyncio.Semaphore(config.worker.slots),
        )
        self.updates = Updates(self.services, self._reader, self._waiting("weights"))
        port = config.worker.metrics_port
        self.metrics = Metrics(self.services, port) if port is not None else None
        self._held: dict[str, HeldJob] = {}
        #: Leases that were another's at the last beat, while something that may have ended them was on its way.
        self._doubtful: set[Lease] = set()
        self.heartbeat = Heartbeat(
            config.redis.url,
            self.keys,
            self.name,
            leases=self._leases,
            lost=self._lose,
            every_s=config.worker.heartbeat_s,
            stuck_s=config.worker.stuck_s,
        )
        self.caretaker = Caretaker(self.services, self.updates, self._waiting("engine"), self._held)
        self._leasing = asyncio.Lock()
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._broken: asyncio.Future[None] | None = None
        self.presence = Presence(
            self.services,
            self.updates,
            waits=self._waits,
            held=self._held,
            draining=self._draining,
            metrics_url=self.metrics.url if self.metrics else "",
            requests=self._waiting("requests"),
        )

    def _checks(self) -> "Checks | None":
        """The way to the verifier pool, where rewards are computed there."""
        if self.config.reward.pool.kind == "process":
            return None
        from workers.rewards.pool.client import Checks

        return Checks(self.config, self.keys, self.name, self._waiting("rewards"))

    def _waiting(self, what: str) -> Waiting:
        if what not in self._waits:
            self._waits[what] = Waiting(self._notes, self.keys, f"worker:{self.name}:{what}")
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
        self._broken = asyncio.get_running_loop().create_future()
        parts = (("presence", self.presence.run()), ("heartbeat", self.heartbeat.run()), ("serve", self._serve()))
        tasks = [asyncio.create_task(work, name=name) for name, work in parts]
        stop = asyncio.create_task(self._draining.wait(), name="stop")
        try:
            first: set[asyncio.Future[Any]] = {*tasks, self._broken, stop}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            self._raise_what_died(tasks)
            await self._finish(tasks)
            self._raise_what_died(tasks)
        finally:
            self._draining.set()
            try:
                await self._hand_back()
            finally:
                for task in (*tasks, stop):
                    task.cancel()
                await asyncio.gather(*tasks, stop, return_exceptions=True)
                await self._close()

    def _raise_what_died(self, tasks: "list[asyncio.Task[None]]") -> None:
        assert self._broken is not None
        for done in (*tasks, self._broken):
            if done.done():
                done.result()

    async def _serve(self) -> None:
        """Start the engine with the current weights, then take jobs, updates and deaths as they come."""
        await self.caretaker.first_start()
        work: list[Coroutine[Any, Any, None]] = [self._intake(), self.updates.run(), self.caretaker.run()]
        names = ["intake", "weights", "engine"]
        if self.config.engine.router is not None:
            engine = self.services.engine
            work.append(follow_members(self.services.control, self.keys, engine.name, engine.set_members))
            names.append("members")
        if (checks := self.services.rewards.checks) is not None:
            work.append(checks.run())
            names.append("checks")
        async with asyncio.TaskGroup() as group:
            for name, task in zip(names, work, strict=True):
                group.create_task(task, name=name)

    # --- jobs -----------------------------------------------------------------------------------------------------

    async def _intake(self) -> None:
        """Lease as much as fits, sleep on `wake` when there is nothing."""
        waiting = self._waiting("intake")
        losses = self.control.losses
        stop = asyncio.create_task(self._draining.wait())
        while not self._draining.is_set():
            if losses != self.control.losses:
                losses = self.control.losses
                await self._sweep_own()
            try:
                took = await self._lease()
            except QueueFull as exc:
                waiting.for_(str(exc))
                await asyncio.wait({stop}, timeout=WAKE_S)
                continue
            if took:
                waiting.end()
                continue
            waiting.for_(self._why_idle())
            await self._until_worth_a_look(stop)
        waiting.end()

    async def _until_worth_a_look(self, stop: "asyncio.Task[Any]") -> None:
        self.services.room.clear()
        if self._has_room():
            look = asyncio.create_task(
                self._waker.do(lambda client: client.blpop([self.keys.wake], timeout=WAKE_S)), name="wake"
            )
        else:
            look = asyncio.create_task(self.services.room.wait(), name="room")
        # Not WAKE_S again: a read that is cancelled costs its connection.
        timeout = None if look.get_name() == "wake" else LOOK_S
        await asyncio.wait({look, stop}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        look.cancel()
        # One that died of a defect takes the process down.
        await asyncio.wait({look})
        if not look.cancelled():
            look.result()

    @property
    def _num_undrawn(self) -> int:
        return sum(held.num_undrawn for held in self._held.values())

    def _has_room(self) -> bool:
        services, slots = self.services, self.config.worker.slots
        return (
            self._num_undrawn < slots
            and sum(held.num_open for held in self._held.values()) < MAX_OPEN * slots
            and services.engine.version >= 0
            and not services.engine_lost.is_set()
            and not services.engine.offloaded
        )

    def _why_idle(self) -> str:
        engine = self.services.engine
        if self.services.crash_loop:
            return "its engine, which is in a crash loop"
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
        async with self._leasing:
            if self._draining.is_set() or not self._has_room():
                return 0
            suspects = sum(held.lease.lane == "suspect" for held in self._held.values())
            free = self.config.worker.slots - self._num_undrawn
            most = max(1, free // self.config.rollout.n)
            # An engine that has finished nothing yet takes what is no suspect first: it could not say who is to blame.
            leases = await self._lease_up_to(most, max(0, 1 - suspects) if self.services.is_sure else 0)
            if not leases and not self._held and not self.services.is_sure and await self.caretaker.makes_sure():
                leases = await self._lease_up_to(most, 1)
            for lease in leases:
                self._hold(HeldJob(self.services, lease))
            return len(leases)

    async def _lease_up_to(self, most: int, suspects: int) -> list[scripts.RawLease]:
        services = self.services
        call = scripts.lease(
            self.keys,
            self.name,
            new_token(),
            most=most,
            version=services.engine.version,
            suspects=suspects,
            highest=services.highest,
        )
        return await self.control.call(call)

    def _hold(self, held: HeldJob) -> None:
        before = self._held.get(held.job)
        if before is not None:
            # Leased anew, so the lease we had is over.
            before.lose()
        self._held[held.job] = held
        held.start().add_done_callback(partial(self._forget, held))

    def _forget(self, held: HeldJob, task: "asyncio.Task[None]") -> None:
        if self._held.get(held.job) is held:
            del self._held[held.job]
        self.services.room.set()
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(failure)

    async def _sweep_own(self) -> None:
        """A lease whose reply was lost belongs to us without our knowing: hand it back."""
        async with self._leasing:
            known = [job for job, held in self._held.items() if not held.lost]
            for lane in LANES:
                for job in await self.control.call(scripts.abandon(self.keys, lane, self.name, known)):
                    log.warning("the lease of job %s came back to the queue: its reply was lost", job)

    def _leases(self) -> list[Lease]:
        return [(job, held.lease.token) for job, held in list(self._held.items()) if not held.lost]

    def _lose(self, gone: set[Lease]) -> None:
        """Stop what was leased to somebody else meanwhile."""
        for job, token in gone:
            held = self._held.get(job)
            # A commit on its way may have ended the lease by itself: its answer tells, or the next beat.
            if held and held.lease.token == token and (not held.is_ending or (job, token) in self._doubtful):
                held.lose()
        self._doubtful = gone

    # --- end ----------------------------------------------------------------------------------------------------------

    async def _finish(self, tasks: "list[asyncio.Task[None]]") -> None:
        """Let what runs end, for as long as it may, or until told to hurry."""
        assert self._broken is not None
        ended = asyncio.create_task(self._all_ended())
        hurry = asyncio.create_task(self._hurry.wait())
        first: set[asyncio.Future[Any]] = {ended, hurry, self._broken, *tasks}
        timeout = self.config.worker.drain_timeout_s
        await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, hurry):
            task.cancel()
        await asyncio.gather(ended, hurry, return_exceptions=True)

    async def _all_ended(self) -> None:
        async with self._leasing:
            pass  # a lease on its way has arrived
        while tasks := [held.task for held in self._held.values() if held.task is not None]:
            await asyncio.wait(tasks)

    async def _hand_back(self) -> None:
        """Keep prefixes, hand every job back without a charge, and whatever else is ours without our knowing."""
        for held in list(self._held.values()):
            held.release()
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self._all_ended()
                await self._sweep_own()
        except TimeoutError:
            log.error("%d jobs could not be handed back in %g s: their leases run out", len(self._held), HAND_BACK_S)

    async def _close(self) -> None:
        await self.services.engine.stop()
        await self.services.rewards.close()
        await self.services.commits.close()
        for waiting in self._waits.values():
            waiting.end()
        await self.presence.end()
        for control in (self.control, self._reader, self._waker):
            await control.close()
        self._notes.close()
        if self.metrics is not None:
            self.metrics.close()


async def _run(config: Config, name: str) -> None:
    worker = Worker(config, name)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    try:
        await worker.run()
    except* PenstockError as group:
        # One sentence instead of a tree of tasks.
        raise _first(group) from None


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def main(config: Config, name: str) -> int:
    """Run one worker until SIGTERM or SIGINT. Blocks."""
    with staying_alive():
        run_through(_run(config, name), uvloop.new_event_loop)
    return 0
