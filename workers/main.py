"""Run a rollout worker: lease jobs from the queue and process them with one engine.

| task | waits for | unblocked by |
|---|---|---|
| intake | a free slot, a job that its engine may start | a finished sample; loaded weights; `wake` (jobs/intake.py) |
| jobs | slot, engine, reward, Redis | see jobs/held_job.py |
| heartbeat | time | - (see jobs/heartbeat.py: a thread renews the leases) |
| weights | a publication; running samples (drain); the cohort (one_step) | the stream `weights:MODEL` |
| engine | the engine's death | engine_supervisor.py: a restart with the newest publication (I9) |
| members | the list of a router's engines | `penstock fleet` |
| checks | verifier pool results, with reward.pool.kind rq | see rewards/pool/client.py |
| presence | time | - |
| logs | time | - (rotates the engine's log) |

The first task that fails ends the process with its error. SIGTERM drains: the worker stops leasing, and running samples
have ``worker.drain_timeout_s`` to finish. In both cases prefixes are kept and jobs handed back. A drain charges no
attempt; an error charges a job from the third worker on that fails while running it. Leases run out only if the
process is killed, except by its keeper (system/keeper.py) because user code blocked the drain.
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
from penstock.workers.engine_supervisor import EngineSupervisor
from penstock.workers.hooks.maker import GenerateHooks
from penstock.workers.hooks.sample_hooks import SampleHooks
from penstock.workers.jobs.commits import Commits
from penstock.workers.jobs.environments import Environments, allowed_environments
from penstock.workers.jobs.heartbeat import Heartbeat
from penstock.workers.jobs.held_job import HeldJobs
from penstock.workers.jobs.intake import Intake
from penstock.workers.jobs.stops import Outcomes
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

#: Longest wait for Redis, in seconds, when a keeper hands back the jobs of a killed worker.
PATIENCE_S = 1.0

#: Longest wait for a hand-back, in seconds.
HAND_BACK_S = 15.0


class Worker:
    """Run one worker process until ``drain``, or until a task fails."""

    def __init__(self, config: Config, name: str, token: str = "") -> None:
        if config.redis.url is None:
            raise ConfigError("The worker needs redis.url: the address of the run's Redis.")
        self.config = config
        self.keys = Keys(config.run)
        # A worker name must be unique: a restarted worker must not be mistaken for its predecessor.
        self.name = unique_name(name, token or new_token())
        with contextlib.closing(Control(config.redis.url)) as control:
            control.do(lambda client: ensure_lanes(client, self.keys))
        #: Waits by task, published in the presence record.
        self._waits: dict[str, Waiting] = {}
        self.control = AsyncControl(config.redis.url)
        self._reader = AsyncControl(config.redis.url, block_s=2.0)
        self._waker = AsyncControl(config.redis.url, block_s=2.0)
        log_dir = config.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._engine_logs = engine_logs(log_dir, name)
        self.services = self._make_services(make_engine(config, name, log_dir))
        # The GPUs of an external engine, or of engines behind a router, are unknown here.
        mine = config.engine.url is None and config.engine.router is None
        self._gpus = GpuWatch(visible_to(config.engine)) if mine else None
        if self._gpus is not None:
            self.services.gpus = self._gpus.loads
        self.updates = WeightLoop(self.services, self._reader, self._waiting("weights"))
        self.metrics = serve(config, "worker", name, WorkerCollector(self.services))
        self.held = HeldJobs(self.services)
        self.heartbeat = self._make_heartbeat(config.redis.url)
        self.supervisor = EngineSupervisor(self.services, self.updates, self._waiting("engine"), self.held)
        self._endpoint: Endpoint | None = None
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self.intake = Intake(
            self.services,
            self.held,
            waker=self._waker,
            waiting=self._waiting("intake"),
            draining=self._draining,
            verify_before_suspect=self.supervisor.verify_before_suspect,
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
        # Import first: a failed import would fail every job of its dataset.
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
            makers=GenerateHooks(config),
            sample_hooks=SampleHooks(config),
            tokenizer=tokenizer,
            commits=Commits(config, self.keys, self.control, self._waiting("commit"), self.name),
            outcomes=Outcomes(config),
            slots=asyncio.Semaphore(config.worker.slots),
            agents=self._agents(config, engine, tokenizer),
        )

    def _agents(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> Agents | None:
        """Create the registry of agent episodes; return None if no dataset uses agents."""
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
        """Create the client of the verifier pool; return None if rewards are computed elsewhere."""
        if self.config.reward.pool.kind == "process":
            return None
        from penstock.workers.rewards.pool.client import Checks

        return Checks(self.config, self.keys, self.name, self._waiting("rewards"))

    def _waiting(self, task: str) -> Waiting:
        return self._waits.setdefault(task, Waiting())

    def drain(self) -> None:
        """Stop leasing, finish running samples, and exit. Safe in a signal handler of the loop, like ``hurry``."""
        if not self._draining.is_set():
            log.info("draining: %d jobs running", len(self.held))
            self._draining.set()

    def hurry(self) -> None:
        """Hand back running samples at once and exit."""
        self.drain()
        self._hurry.set()

    async def run(self) -> None:
        """Run the worker until ``drain``. Raises the error of a failed task. Blocks."""
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
        """Start the engine with the current weights, then process jobs, updates and crashes."""
        await self.supervisor.first_start()
        if self.services.agents is not None:
            await self.services.agents.verify()
            self._endpoint = Endpoint(self.config, self.services.agents)
            await self._endpoint.start()
            self.services.agents_url = self._endpoint.url
        work: list[Coroutine[Any, Any, None]] = [self.intake.run(), self.updates.run(), self.supervisor.run()]
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
        """Wait until all jobs end, ``hurry`` is called, or ``worker.drain_timeout_s`` passes."""
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
        """Keep prefixes, and hand back every job and every lease without a running job.

        Args:
            death: error that ends this worker; '' for a drain, which charges no job.
        """
        self.held.release(death)
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self._all_ended()
                await self.intake.sweep_own(death)
        except TimeoutError:
            log.error("failed to hand back %d jobs in %g s; their leases will run out", len(self.held), HAND_BACK_S)

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
    """Return the unique lease owner name of a worker process."""
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
        # Report one error instead of an exception group.
        raise _first(group) from None


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _hand_back_killed(config: Config, worker: str) -> None:
    """Hand back the leases of a worker that its keeper killed, without a charge."""
    assert config.redis.url is not None
    keys = Keys(config.run)
    try:
        with contextlib.closing(Control(config.redis.url, patience_s=PATIENCE_S, check=False)) as control:
            jobs = [job for lane in LANES for job in control.call(scripts.abandon(keys, lane, worker, ()))]
            control.call(scripts.note(keys, keys.workers, worker, b""))
        log.warning("handed back %d jobs of the killed worker", len(jobs))
    except Exception as exc:
        log.error("failed to hand back the jobs of the killed worker; their leases will run out: %s", format_exc(exc))


def main(config: Config, name: str) -> int:
    """Run one worker in a child process under a keeper until SIGTERM or SIGINT. Blocks."""
    token = new_token()
    keeper.keep(config.worker.drain_timeout_s, lambda: _hand_back_killed(config, unique_name(name, token)))
    with staying_alive():
        run_through(_run(config, name, token), uvloop.new_event_loop)
    return 0
