"""What the tasks of one worker share."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from penstock.config import Config
from penstock.control import AsyncControl
from penstock.keys import Keys
from workers.commits import Commits
from workers.endings import Endings
from workers.engine import Engine
from workers.gate import Gate
from workers.repeats import Repeats
from workers.rewards import Rewards
from workers.stops import Tokenizer


@dataclass(slots=True)
class Tally:
    """Running sums for presence and metrics."""

    generated_tokens: int = 0
    committed_samples: int = 0
    committed_groups: int = 0
    #: Tries that failed, by reason; crashes of the engine and lost leases are not among them.
    failures: Counter[str] = field(default_factory=Counter)
    #: Jobs that were charged with a death of the engine, by what became of them: resume, suspect, dead.
    crashes: Counter[str] = field(default_factory=Counter)
    lost_leases: int = 0
    handed_back: int = 0
    engine_restarts: int = 0
    weight_updates: int = 0
    weight_pause_s: float = 0.0
    #: Prefixes kept while they were drawn, and the bytes written for them.
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    @property
    def failed_jobs(self) -> int:
        return sum(self.failures.values())

    @property
    def progress(self) -> int:
        """Grows with everything that comes to its end here."""
        return self.committed_samples + self.crashes["dead"]


@dataclass(slots=True)
class Services:
    """Handed to every task; none of them imports another."""

    config: Config
    keys: Keys
    #: Name of this worker process; also its name in the consumer group, so it is never used twice.
    worker: str
    control: AsyncControl
    engine: Engine
    gate: Gate
    rewards: Rewards
    tokenizer: Tokenizer
    commits: Commits
    #: Bounds the samples that are generated at once.
    slots: asyncio.Semaphore
    #: Set by whoever sees the engine die first; the engine task restarts it.
    engine_lost: asyncio.Event = field(default_factory=asyncio.Event)
    #: What whoever saw it die first said of it.
    loss: str = ""
    #: Why the engine is not tried any more but now and then; '' unless it is in a crash loop.
    crash_loop: str = ""
    #: Starts of the engine so far.
    births: int = 0
    #: Set whenever a sample was drawn or a job has ended: there may be room for another.
    room: asyncio.Event = field(default_factory=asyncio.Event)
    tally: Tally = field(default_factory=Tally)
    endings: Endings = field(default_factory=Endings)
    repeats: Repeats = field(default_factory=Repeats)
    #: Set where others wait for what presence shows.
    show: asyncio.Event = field(default_factory=asyncio.Event)
    #: Samples that hold a slot now.
    num_running: int = 0

    #: Holds the gate while the engine is being restarted; it stays shut when that is given up.
    _shut: ExitStack = field(default_factory=ExitStack)

    def lose_engine(self, birth: int, reason: str = "") -> None:
        """Have the engine of start ``birth`` restarted; late news of an earlier one say nothing of this one.

        The gate shuts at once: who was not at the engine when it died must not be charged with its death.
        """
        if birth == self.births and not self.engine_lost.is_set():
            self._shut.enter_context(self.gate.requests.held("the engine is being restarted"))
            self.loss = reason
            self.engine_lost.set()

    def engine_is_back(self) -> None:
        """Let requests through again."""
        self.engine_lost.clear()
        self._shut.close()
