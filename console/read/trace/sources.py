"""Where traces of a run are read from: its history, its Redis where that answers, and the files of its trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.read.trace.steps import Step, read_steps, trainer_of
from penstock.history.reader import HistoryReader
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client


@dataclass(frozen=True, slots=True)
class Sources:
    """Of one run."""

    #: With what is still in Redis.
    samples: HistoryReader
    #: The run's Redis, where it answers.
    live: tuple[Client, Keys] | None
    #: Of the run's own trainer, and its subscription.
    steps: Sequence[Step]
    subscription: str


def sources_of(folder: Path, samples: HistoryReader, live: tuple[Client, Keys] | None) -> Sources:
    """Those of the run in ``folder``. Blocks for the disk."""
    steps = read_steps(folder)
    return Sources(samples, live, steps, trainer_of(folder, steps))
