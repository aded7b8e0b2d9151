"""Hold the services and totals that the tasks of a worker share."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from penstock.config import Config
from penstock.model.tokenizer import Tokenizer
from penstock.protocol import scripts
from penstock.protocol.presence import GpuLoad
from penstock.records.job import JobState
from penstock.records.keys import Keys
from penstock.records.publication import publication_id
from penstock.records.sample import Sample
from penstock.records.worker_causes import EngineRestarting
from penstock.redis.control import AsyncControl
from penstock.workers.agents.agents import Agents
from penstock.workers.engine import Engine, Segment
from penstock.workers.hooks.maker import GenerateHooks
from penstock.workers.hooks.open_calls import OpenCalls
from penstock.workers.hooks.recorded_engine import Repeats
from penstock.workers.hooks.sample_hooks import SampleHooks
from penstock.workers.jobs.commits import Commits
from penstock.workers.jobs.environments import Environments
from penstock.workers.jobs.generate import Source
from penstock.workers.jobs.stops import Outcomes
from penstock.workers.jobs.valves import Valves
from penstock.workers.rewards.frozen import FrozenModels
from penstock.workers.rewards.score import Rewards


@dataclass(slots=True)
class Tally:
    """Count totals for presence and metrics."""

    generated_tokens: int = 0
    committed_samples: int = 0
    committed_groups: int = 0
    #: Generated tokens of committed samples, and their tokens found in the engine's prefix cache.
    committed_tokens: int = 0
    cached_tokens: int = 0
    #: Engine time and reward time of committed samples, summed over samples.
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: Group rewards, and their time, including reading the samples.
    group_rewards: int = 0
    group_reward_s: float = 0.0
    #: Answered requests that resumed an aborted answer.
    resent_requests: int = 0
    #: Prompt tokens of all answers of the engine, and those found in its prefix cache.
    prompt_tokens: int = 0
    prompt_cached_tokens: int = 0
    #: Answers with speculative decoding: generated tokens, draft verifications, drafted tokens, accepted tokens.
    draft_answer_tokens: int = 0
    draft_checks: int = 0
    drafted_tokens: int = 0
    right_draft_tokens: int = 0
    #: Failed attempts by reason, without engine crashes and lost leases.
    failures: Counter[str] = field(default_factory=Counter)
    #: Jobs charged with an engine crash, by next state: resume, suspect, dead.
    crashes: Counter[str] = field(default_factory=Counter)
    lost_leases: int = 0
    handed_back: int = 0
    engine_restarts: int = 0
    weight_updates: int = 0
    weight_pause_s: float = 0.0
    weight_load_s: float = 0.0
    weight_wait_s: float = 0.0
    #: Versions fetched to this machine (serving, or transport delta) by origin (whole, deltas, here), their bytes, and
    #: the duration.
    weight_copies: Counter[str] = field(default_factory=Counter)
    weight_copy_bytes: int = 0
    weight_copy_s: float = 0.0
    #: Prefix checkpoints of running samples, and their bytes.
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    def answered(self, segment: Segment, is_resent: bool = False) -> None:
        """Count an answer of the engine, even if its tokens are discarded later.

        Args:
            is_resent: the request resumed an aborted answer.
        """
        self.resent_requests += is_resent
        self.prompt_tokens += segment.prompt_tokens
        self.prompt_cached_tokens += segment.cached_tokens
        if (drafts := segment.drafts) is not None:
            self.draft_answer_tokens += len(segment.output_ids)
            self.draft_checks += drafts.checks
            self.drafted_tokens += drafts.drafted
            self.right_draft_tokens += drafts.right

    def committed(self, sample: Sample | None) -> None:
        """Count a committed sample; pass None if it is no longer in memory."""
        self.committed_samples += 1
        if sample is not None:
            self.committed_tokens += sum(sample.generated)
            self.cached_tokens += sample.cached_tokens
            self.generate_s += sample.generate_s
            self.reward_s += sample.reward_s

    @property
    def failed_jobs(self) -> int:
        return sum(self.failures.values())

    @property
    def progress(self) -> int:
        """Number of finished work items: grows with every committed sample and dead letter."""
        return self.committed_samples + self.crashes[JobState.DEAD]


@dataclass(slots=True)
class Services:
    """Share services and state between tasks, so that tasks do not import each other."""

    config: Config
    keys: Keys
    #: Unique name of this worker process, also in the consumer group.
    worker: str
    control: AsyncControl
    engine: Engine
    valves: Valves
    rewards: Rewards
    frozen: FrozenModels
    environments: Environments
    makers: GenerateHooks
    sample_hooks: SampleHooks
    tokenizer: Tokenizer
    commits: Commits
    outcomes: Outcomes
    #: Limits the number of samples in generation.
    slots: asyncio.Semaphore
    #: Agent episodes, and their URL; None if no dataset uses agents.
    agents: Agents | None = None
    agents_url: str = ""
    #: Set by the first task that detects the loss of the engine; the engine task restarts it.
    engine_lost: asyncio.Event = field(default_factory=asyncio.Event)
    #: Reason of the loss.
    loss: str = ""
    #: Reason of a crash loop; '' without one.
    crash_loop: str = ""
    #: Number of engine starts so far.
    births: int = 0
    #: Number of the engine start that last finished a request: a later crash on a suspect is the job's fault.
    sure_birth: int = -1
    #: Last lost engine: publication (VERSION-REV, '' for none), name of its start, whether it had finished a request.
    died: tuple[str, str, bool] = ("", "", True)
    #: Whether jobs are handed back before the restart, because no job caused the loss.
    hands_back: bool = False
    #: Whether the engine was lost during a weight transfer, which no job caused.
    died_receiving: bool = False
    #: Newest version that was skipped while older weights serve within the bound; -1 if no version was skipped.
    stands_in_for: int = -1
    #: Last publication for which this worker reported a finished request.
    proven: str = ""
    #: Set when a sample was generated or a job ended, so that another job may fit.
    room: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set when weights were loaded or the engine restarted, so that it may start newer jobs (T12).
    may_start_more: asyncio.Event = field(default_factory=asyncio.Event)
    tally: Tally = field(default_factory=Tally)
    #: Open calls of jobs to services and user code.
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    repeats: Repeats = field(default_factory=Repeats)
    #: Set to publish the next presence record at once.
    show: asyncio.Event = field(default_factory=asyncio.Event)
    #: Number of samples in a slot.
    num_running: int = 0
    #: Returns the latest load of the engine's GPUs; () for an external engine or an unknown load.
    gpus: Callable[[], Sequence[GpuLoad]] = tuple

    #: Blocks requests while the engine restarts.
    _shut: ExitStack = field(default_factory=ExitStack)

    @property
    def source(self) -> Source:
        """Source of generated tokens."""
        return Source(self.engine, self.valves, self.tokenizer, self.config.rollout, self.tally.answered)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Acquire a slot for the duration of the ``with``."""
        async with self.slots:
            self.num_running += 1
            try:
                yield
            finally:
                self.num_running -= 1

    def lose_engine(self, birth: int, reason: str = "", *, hands_back: bool = False) -> None:
        """Request a restart of the engine with start number ``birth``; ignore reports about earlier engines.

        Requests are blocked at once, so that jobs that were not at the engine are not charged with its crash.

        Args:
            hands_back: the engine still runs; its jobs are handed back before it is stopped.
        """
        if birth == self.births and not self.engine_lost.is_set():
            self._shut.enter_context(self.valves.requests.held(EngineRestarting()))
            self.loss, self.hands_back = reason, hands_back
            self.died = self.present()
            self.died_receiving = self.engine.is_receiving
            self.engine_lost.set()

    @property
    def is_sure(self) -> bool:
        """Whether the engine has finished a request since it started."""
        return self.sure_birth == self.births

    @property
    def publication(self) -> str:
        """Publication of the engine's weights as ``VERSION-REV``; '' without one."""
        return publication_id(self.engine.version, self.engine.rev) if self.engine.version >= 0 else ""

    @property
    def highest(self) -> int:
        """Highest version at admission that the engine may start (T12)."""
        return max(self.engine.version, self.stands_in_for)

    def present(self) -> tuple[str, str, bool]:
        """Return the state of the running engine in the form of ``died``."""
        return self.publication, f"{self.worker}/{self.births}", self.is_sure

    async def send_outcomes(self) -> None:
        """Send the job outcomes since the last call. Blocks for at most one round trip."""
        await self.outcomes.send(self.control, self.keys)

    async def record_finished(self, birth: int, started_on: str) -> None:
        """Record that the engine with start number ``birth`` finished a request started on publication ``started_on``.

        A request that started and finished on one publication proves that engines work with it. Each publication is
        reported once, in a round trip.
        """
        if birth != self.births or self.engine_lost.is_set():
            return
        self.sure_birth = birth
        if started_on in ("", self.proven) or started_on != self.publication:
            return
        self.proven = started_on
        trials = self.keys.trials(self.config.model.name)
        await self.control.call(scripts.note(self.keys, trials, f"ok:{started_on}", b"1"))

    def regain_engine(self) -> None:
        """Unblock requests."""
        self.engine_lost.clear()
        self._shut.close()
        self.may_start_more.set()
