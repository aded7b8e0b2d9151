"""What the tasks of one worker share."""

import asyncio
from dataclasses import dataclass, field

from penstock.config import Config
from penstock.control import AsyncControl
from penstock.keys import Keys
from workers.commits import Commits
from workers.engine import Engine
from workers.gate import Gate
from workers.rewards import Rewards
from workers.stops import Tokenizer


@dataclass(slots=True)
class Tally:
    """Running sums for presence and metrics."""

    generated_tokens: int = 0
    committed_samples: int = 0
    committed_groups: int = 0
    failed_jobs: int = 0
    lost_leases: int = 0
    engine_restarts: int = 0


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
    tally: Tally = field(default_factory=Tally)
    #: Samples that wait for a slot or are being generated.
    num_generating: int = 0
