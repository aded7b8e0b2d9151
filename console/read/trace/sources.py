"""Sources of a run's traces: its history, its Redis if that answers, and the files of its trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.read.trace.steps import Step, read_steps, trainer_of
from penstock.history.reader import HistoryReader
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of one run."""

    #: Including samples that are still in Redis.
    samples: HistoryReader
    #: The run's Redis, if it answers.
    live: tuple[Client, Keys] | None
    #: Steps of the run's own trainer, and its subscription.
    steps: Sequence[Step]
    subscription: str


def sources_of(folder: Path, samples: HistoryReader, live: tuple[Client, Keys] | None) -> Sources:
    """Open the sources of the run in ``folder``. Blocks for the disk."""
    steps = read_steps(folder)
    return Sources(samples, live, steps, trainer_of(folder, steps))
