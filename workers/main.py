"""A rollout worker: one engine that pulls jobs from the queue.

| task | waits for | unblocked by |
|---|---|---|
| intake | a free slot, a job its engine may start | a sample that ends; loaded weights; `wake` (see jobs/intake.py) |
| jobs | slot, engine, reward, Redis | see jobs/held_job.py |
| heartbeat | time | - (see jobs/heartbeat.py: a thread renews the leases) |
| weights | a publication; running samples (drain); the cohort (one_step) | the stream `weights:MODEL` |
| engine | the engine's death | see engine_supervisor.py: its restart with the newest publication (I9) |
| members | the list of a router's engines | `penstock fleet` |
| checks | verdicts of the verifier pool, with reward.pool.kind rq | see rewards/pool/client.py |
| presence | time | - |
| logs | time | - (rotates the engine's log) |

The first task to fail ends the process with its error. SIGTERM drains: no new lease, and running samples have
``worker.drain_timeout_s`` to finish. In both cases prefixes are kept and jobs handed back: without a charge if the
worker drains, and charged from the third worker on that fails with an error while holding them. Only a killed process
leaves its leases to run out, unless its keeper (system/keeper.py) killed it because user code blocked the drain.
"""

import asyncio
import contextlib
import copy
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError
from penstock.hooks.slime import args_of
from penstock.metrics.gpu_load import GpuWatch, visible_to
from penstock.metrics.server import serve
from penstock.model.tokenizer import Tokenizer, load_tokenizer
from penstock.names import AGENT, LANES, new_token
from penstock.protocol import scripts
from penstock.protocol.scripts import ensure_lanes
from penstock.protocol.waits import Waiting
from penstock.records.keys import Keys
from penstock.redis.control import AsyncControl, Control
from penstock.system import keeper
from penstock.system.log_files import keep_bounded
from penstock.system.user_code import run_through, staying_alive
from penstock.text import format_exc
from penstock.weights.serving import token_of
from penstock.workers.agents.agents import Agents
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.endpoint import Endpoint
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.engine import Engine
from penstock.workers.engine_supervisor import Caretaker
from penstock.workers.hooks.maker import Makers
from penstock.workers.hooks.sample_hooks import SampleHooks
from penstock.workers.jobs.commits import Commits
from penstock.workers.jobs.environments import Environments, allowed_environments
from penstock.workers.jobs.heartbeat import Heartbeat
from penstock.workers.jobs.held_job import HeldJobs
from penstock.workers.jobs.intake import Intake
from penstock.workers.jobs.stops import Endings
from penstock.workers.jobs.valves import Valves
from penstock.workers.metrics import WorkerCollector
from penstock.workers.presence import Presence
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.frozen import FrozenModels
from penstock.workers.rewards.score import Rewards
from penstock.workers.router.members import follow_members, make_engine
from penstock.workers.services import Services
from penstock.workers.sglang.server import engine_logs
from penstock.workers.weights.loop import WeightLoop

if TYPE_CHECKING:
    from penstock.workers.rewards.pool.client import Checks


log = logging.getLogger(__name__)

#: Longest wait for Redis when a keeper hands back the jobs of a killed worker.
PATIENCE_S = 1.0

#: Longest wait for samples to be handed back.
HAND_BACK_S = 15.0


class Worker:
    """One worker process. ``run`` returns after ``drain``, or raises the error that ended a task."""

    def __init__(self, config: Config, name: str, token: str = "") -> None:
        if config.redis.url is None:
            raise ConfigError("The worker needs redis.url: the address of the run's Redis.")
        self.config = config
        self.keys = Keys(config.run)
        # Never reused, or a successor of this name would be taken for it.
        self.name = unique_name(name, token or new_token())
        with contextlib.closing(Control(config.redis.url)) as control:
            control.do(lambda client: ensure_lanes(client, self.keys))
        #: By task; published in the presence record.
        self._waits: dict[str, Waiting] = {}
        self.control = AsyncControl(config.redis.url)
        self._reader = AsyncControl(config.redis.url, block_s=2.0)
        self._waker = AsyncControl(config.redis.url, block_s=2.0)
        log_dir = config.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._engine_logs = engine_logs(log_dir, name)
        self.services = self._make_services(make_engine(config, name, log_dir))
        # An external engine, or several behind a router, use GPUs that this process does not know.
        mine = config.engine.url is None and config.engine.router is None
        self._gpus = GpuWatch(visible_to(config.engine)) if mine else None
        if self._gpus is not None:
            self.services.gpus = self._gpus.loads
        self.updates = WeightLoop(self.services, self._reader, self._waiting("weights"))
        self.metrics = serve(config, "worker", name, WorkerCollector(self.services))
        self.held = HeldJobs(self.services)
        self.heartbeat = self._make_heartbeat(config.redis.url)
        self.caretaker = Caretaker(self.services, self.updates, self._waiting("engine"), self.held)
        self._endpoint: Endpoint | None = None
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self.intake = Intake(
            self.services,
            self.held,
            waker=self._waker,
            waiting=self._waiting("intake"),
            draining=self._draining,
            make_sure=self.caretaker.make_sure,
        )
        self.presence = Presence(
            self.services,
            self.updates,
            waits=self._waits,
            held=self.held,
            draining=self._draining,
            metrics_url=self.metrics.url if self.metrics else "",
            requests=self._waiting("requests"),
            waiting=self._waiting,
        )

    def _make_services(self, engine: Engine) -> Services:
        """Create the services that the tasks share."""
        config = self.config
        # Before anything starts: a failed import would fail every job of its dataset.
        rewards = Rewards(config.reward, self._checks(), allowed_rewards(config), args_of(config), waits=True)
        tokenizer = load_tokenizer(config.model.path)
        return Services(
            config=config,
            keys=self.keys,
            worker=self.name,
            control=self.control,
            engine=engine,
            valves=Valves(),
            rewards=rewards,
            frozen=FrozenModels(config),
            environments=Environments(
                allowed_environments(config), rewards.judges, partial(ModelChat, config, engine, tokenizer)
            ),
            makers=Makers(config),
            sample_hooks=SampleHooks(config),
            tokenizer=tokenizer,
            commits=Commits(config, self.keys, self.control, self._waiting("commit"), self.name),
            endings=Endings(config),
            slots=asyncio.Semaphore(config.worker.slots),
            agents=self._agents(config, engine, tokenizer),
        )

    def _agents(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> Agents | None:
        """Return the episodes of agents; None if no dataset has any."""
        if AGENT not in allowed_environments(config):
            return None
        template = ChatTemplate(copy.deepcopy(tokenizer))
        return Agents(token_of(config), ModelChat(config, engine, tokenizer), template, config.agents.idle_s)

    def _make_heartbeat(self, url: str) -> Heartbeat:
        return Heartbeat(
            url,
            self.keys,
            self.name,
            leases=self.held.leases,
            lost=self.held.lose,
            every_s=self.config.worker.heartbeat_s,
            stuck_s=self.config.worker.stuck_s,
        )

    def _checks(self) -> "Checks | None":
        """Return the client of the verifier pool, if rewards are computed there."""
        if self.config.reward.pool.kind == "process":
            return None
        from penstock.workers.rewards.pool.client import Checks

        return Checks(self.config, self.keys, self.name, self._waiting("rewards"))

    def _waiting(self, task: str) -> Waiting:
        return self._waits.setdefault(task, Waiting())

    def drain(self) -> None:
        """Finish running samples and leave. Safe in a signal handler of the loop, as is ``hurry``."""
        if not self._draining.is_set():
            log.info("draining: %d jobs are held", len(self.held))
            self._draining.set()

    def hurry(self) -> None:
        """Leave, and hand running samples back at once."""
        self.drain()
        self._hurry.set()

    async def run(self) -> None:
        """Work until ``drain``. Blocks."""
        limits = self.config.logs
        parts = (
            ("presence", self.presence.run()),
            ("heartbeat", self.heartbeat.run()),
            ("serve", self._serve()),
            ("logs", keep_bounded(self._engine_logs, limits.max_bytes)),
        )
        tasks = [asyncio.create_task(work, name=name) for name, work in parts]
        stop = asyncio.create_task(self._draining.wait(), name="stop")
        death = ""
        try:
            first: set[asyncio.Future[Any]] = {*tasks, self.held.failed, stop}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            self._raise_first_error(tasks)
            await self._finish(tasks)
            self._raise_first_error(tasks)
        except BaseException as exc:
            death = format_exc(exc)
            raise
        finally:
            self._draining.set()
            try:
                await self._hand_back(death)
            finally:
                for task in (*tasks, stop):
                    task.cancel()
                await asyncio.gather(*tasks, stop, return_exceptions=True)
                await self._close()

    def _raise_first_error(self, tasks: "list[asyncio.Task[None]]") -> None:
        for done in (*tasks, self.held.failed):
            if done.done():
                done.result()

    async def _serve(self) -> None:
        """Start the engine with the current weights, then handle jobs, updates and crashes."""
        await self.caretaker.first_start()
        if self.services.agents is not None:
            await self.services.agents.verify()
            self._endpoint = Endpoint(self.config, self.services.agents)
            await self._endpoint.start()
            self.services.agents_url = self._endpoint.url
        work: list[Coroutine[Any, Any, None]] = [self.intake.run(), self.updates.run(), self.caretaker.run()]
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

    async def _finish(self, tasks: "list[asyncio.Task[None]]") -> None:
        """Wait until held jobs end, at most ``worker.drain_timeout_s``, or until ``hurry``."""
        ended = asyncio.create_task(self._all_ended())
        hurry = asyncio.create_task(self._hurry.wait())
        first: set[asyncio.Future[Any]] = {ended, hurry, self.held.failed, *tasks}
        timeout = self.config.worker.drain_timeout_s
        await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, hurry):
            task.cancel()
        await asyncio.gather(ended, hurry, return_exceptions=True)

    async def _all_ended(self) -> None:
        await self.intake.settled()
        await self.held.ended()

    async def _hand_back(self, death: str) -> None:
        """Keep prefixes, and hand back every job and every lease without a held job.

        Args:
            death: the error that ends this worker; '': it drains, and no job is charged.
        """
        self.held.release(death)
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self._all_ended()
                await self.intake.sweep_own(death)
        except TimeoutError:
            log.error("failed to hand back %d jobs in %g s: their leases run out", len(self.held), HAND_BACK_S)

    async def _close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        await self.services.engine.stop()
        await asyncio.to_thread(self.updates.store.close)
        await self.services.rewards.close()
        await self.services.frozen.close()
        await self.services.commits.close()
        await self.presence.end()
        for control in (self.control, self._reader, self._waker):
            await control.close()
        if self._gpus is not None:
            self._gpus.close()
        if self.metrics is not None:
            self.metrics.close()


def unique_name(name: str, token: str) -> str:
    """Return the name under which one process of a worker holds leases."""
    return f"{name}.{token[:8]}"


async def _run(config: Config, name: str, token: str) -> None:
    worker = Worker(config, name, token)
    loop = asyncio.get_running_loop()
    for number in keeper.END:
        loop.add_signal_handler(number, worker.drain)
    loop.add_signal_handler(keeper.HURRY, worker.hurry)
    try:
        await worker.run()
    except* PenstockError as group:
        # One sentence instead of a tree of tasks.
        raise _first(group) from None


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _hand_back_killed(config: Config, worker: str) -> None:
    """Return the leases of a worker that its keeper killed to the queue; no job is charged."""
    assert config.redis.url is not None
    keys = Keys(config.run)
    try:
        with contextlib.closing(Control(config.redis.url, patience_s=PATIENCE_S, check=False)) as control:
            jobs = [job for lane in LANES for job in control.call(scripts.abandon(keys, lane, worker, ()))]
            control.call(scripts.note(keys, keys.workers, worker, b""))
        log.warning("%d jobs of the killed worker went back to the queue", len(jobs))
    except Exception as exc:
        log.error("failed to hand back the jobs of the killed worker, their leases run out: %s", format_exc(exc))


def main(config: Config, name: str) -> int:
    """Run one worker until SIGTERM or SIGINT, in a process of its own under a keeper. Blocks."""
    token = new_token()
    keeper.keep(config.worker.drain_timeout_s, lambda: _hand_back_killed(config, unique_name(name, token)))
    with staying_alive():
        run_through(_run(config, name, token), uvloop.new_event_loop)
    return 0
