"""Services and totals that the tasks of one worker share."""

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
from penstock.workers.hooks.draws import Repeats
from penstock.workers.hooks.maker import Makers
from penstock.workers.hooks.open_calls import OpenCalls
from penstock.workers.hooks.sample_hooks import SampleHooks
from penstock.workers.jobs.commits import Commits
from penstock.workers.jobs.environments import Environments
from penstock.workers.jobs.generate import Source
from penstock.workers.jobs.stops import Endings
from penstock.workers.jobs.valves import Valves
from penstock.workers.rewards.frozen import FrozenModels
from penstock.workers.rewards.score import Rewards


@dataclass(slots=True)
class Tally:
    """Running totals for presence and metrics."""

    generated_tokens: int = 0
    committed_samples: int = 0
    committed_groups: int = 0
    #: Generated tokens of committed samples, and their tokens that the engine had cached.
    committed_tokens: int = 0
    cached_tokens: int = 0
    #: Time of committed samples' requests at the engine, and of their rewards, summed over samples.
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: Rewards of whole groups, and their time, reading the samples included.
    group_rewards: int = 0
    group_reward_s: float = 0.0
    #: Answered requests that were sent again after an aborted answer.
    resent_requests: int = 0
    #: Prompt tokens of all answers of the engine, and those that it had cached.
    prompt_tokens: int = 0
    prompt_cached_tokens: int = 0
    #: Answers with speculative decoding: tokens generated, draft checks, tokens drafted, tokens accepted.
    draft_answer_tokens: int = 0
    draft_checks: int = 0
    drafted_tokens: int = 0
    right_draft_tokens: int = 0
    #: Failed attempts, by reason; engine crashes and lost leases not included.
    failures: Counter[str] = field(default_factory=Counter)
    #: Jobs that were charged with an engine crash, by their next state: resume, suspect, dead.
    crashes: Counter[str] = field(default_factory=Counter)
    lost_leases: int = 0
    handed_back: int = 0
    engine_restarts: int = 0
    weight_updates: int = 0
    weight_pause_s: float = 0.0
    weight_load_s: float = 0.0
    weight_wait_s: float = 0.0
    #: Versions fetched to this machine (serving, or transport delta), by origin: whole, deltas, here; their bytes, and
    #: the time it took.
    weight_copies: Counter[str] = field(default_factory=Counter)
    weight_copy_bytes: int = 0
    weight_copy_s: float = 0.0
    #: Prefix checkpoints of running samples, and the bytes written for them.
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    def answered(self, segment: Segment, is_resent: bool = False) -> None:
        """Count an answer of the engine, even if its sample is discarded.

        Args:
            is_resent: its request was sent again, with the tokens so far, after an aborted answer.
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
        """Count a committed sample; None if it is no longer in memory."""
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
        """Count of finished work: grows with every committed sample and dead letter."""
        return self.committed_samples + self.crashes[JobState.DEAD]


@dataclass(slots=True)
class Services:
    """Passed to every task, so that none imports another."""

    config: Config
    keys: Keys
    #: Name of this worker process; also its name in the consumer group, so it is never used twice.
    worker: str
    control: AsyncControl
    engine: Engine
    valves: Valves
    rewards: Rewards
    frozen: FrozenModels
    environments: Environments
    makers: Makers
    sample_hooks: SampleHooks
    tokenizer: Tokenizer
    commits: Commits
    endings: Endings
    #: Bounds the samples that are generated at once.
    slots: asyncio.Semaphore
    #: Episodes of agents, and where they are served; None: no dataset has any.
    agents: Agents | None = None
    agents_url: str = ""
    #: Set by the first task that sees the engine die; the engine task restarts it.
    engine_lost: asyncio.Event = field(default_factory=asyncio.Event)
    #: The error of that task.
    loss: str = ""
    #: Why the engine is restarted only now and then; '' unless it is in a crash loop.
    crash_loop: str = ""
    #: Starts of the engine so far.
    births: int = 0
    #: The start of the engine that last finished something: if it then crashes on a suspect, the job is the cause.
    sure_birth: int = -1
    #: State of the engine lost last: publication (VERSION-REV, '' for none), name of its start, whether it was sure.
    died: tuple[str, str, bool] = ("", "", True)
    #: Whether its jobs are handed back before it is replaced, because no job caused the loss.
    hands_back: bool = False
    #: Whether it was lost during a weight transfer: no job caused that.
    died_receiving: bool = False
    #: Newest version set aside while older weights serve as far as the bound allows; -1: none.
    stands_in_for: int = -1
    #: The last publication on which this worker reported a finished request.
    proven: str = ""
    #: Set whenever a sample was generated or a job has ended: another may fit.
    room: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set whenever weights were loaded or the engine is back: it may start jobs it could not before (T12).
    may_start_more: asyncio.Event = field(default_factory=asyncio.Event)
    tally: Tally = field(default_factory=Tally)
    #: Open calls of its jobs to services and user code.
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    repeats: Repeats = field(default_factory=Repeats)
    #: Set if others wait for the next presence record.
    show: asyncio.Event = field(default_factory=asyncio.Event)
    #: Samples that hold a slot now.
    num_running: int = 0
    #: Latest load of the engine's GPUs; () if it is external, or the load is unknown.
    gpus: Callable[[], Sequence[GpuLoad]] = tuple

    #: Blocks requests while the engine restarts.
    _shut: ExitStack = field(default_factory=ExitStack)

    @property
    def source(self) -> Source:
        """Where tokens come from."""
        return Source(self.engine, self.valves, self.tokenizer, self.config.rollout, self.tally.answered)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it inside the ``with``."""
        async with self.slots:
            self.num_running += 1
            try:
                yield
            finally:
                self.num_running -= 1

    def lose_engine(self, birth: int, reason: str = "", *, hands_back: bool = False) -> None:
        """Request a restart of the engine of start ``birth``; reports about an earlier engine are ignored.

        Requests are blocked at once: jobs not at the engine when it died must not be charged with its crash.

        Args:
            hands_back: it still runs, and its jobs are handed back before it is stopped.
        """
        if birth == self.births and not self.engine_lost.is_set():
            self._shut.enter_context(self.valves.requests.held(EngineRestarting()))
            self.loss, self.hands_back = reason, hands_back
            self.died = self.present()
            self.died_receiving = self.engine.is_receiving
            self.engine_lost.set()

    @property
    def is_sure(self) -> bool:
        """True if the engine has finished something since it started."""
        return self.sure_birth == self.births

    @property
    def publication(self) -> str:
        """``VERSION-REV`` of the engine's weights; '' for none."""
        return publication_id(self.engine.version, self.engine.rev) if self.engine.version >= 0 else ""

    @property
    def highest(self) -> int:
        """Highest version at admission that the engine may start (T12)."""
        return max(self.engine.version, self.stands_in_for)

    def present(self) -> tuple[str, str, bool]:
        """Return the same as ``died``, for the running engine."""
        return self.publication, f"{self.worker}/{self.births}", self.is_sure

    async def tell_endings(self) -> None:
        """Record the outcomes of jobs since the last call. Blocks for a round trip at most."""
        await self.endings.tell(self.control, self.keys)

    async def note_finished(self, birth: int, begun_on: str) -> None:
        """Record that the engine of start ``birth`` finished a request that began on publication ``begun_on``.

        A request that began and ended on one publication proves that engines work with it: reported once, in a round
        trip.
        """
        if birth != self.births or self.engine_lost.is_set():
            return
        self.sure_birth = birth
        if begun_on in ("", self.proven) or begun_on != self.publication:
            return
        self.proven = begun_on
        trials = self.keys.trials(self.config.model.name)
        await self.control.call(scripts.note(self.keys, trials, f"ok:{begun_on}", b"1"))

    def regain_engine(self) -> None:
        """Unblock requests."""
        self.engine_lost.clear()
        self._shut.close()
        self.may_start_more.set()
