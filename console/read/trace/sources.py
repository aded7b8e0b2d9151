"""Sources of a run's traces: its history, its Redis if that answers, and the files of its trainer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.read.trace.stages import Step, read_steps, trainer_of
from penstock.errors import ConfigError
from penstock.history.reader import HistoryReader
from penstock.history.row import key_of
from penstock.names import is_name
from penstock.records.keys import Keys
from penstock.redis.commands import Client

_JOB = re.compile(r"([^/]+)/([0-9]{1,18})/([0-9]{1,18})")
_PROMPT = re.compile(r"([^/]+)/([0-9]{1,18})")
_BATCH = re.compile(r"(?:([^:/]+):)?([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Asked:
    """A target; exactly one kind is set."""

    #: Id of a job, and of one of its samples, '' for all.
    job: str = ""
    sample: str = ""
    #: A prompt: its dataset and line.
    dataset: str = ""
    line: int = -1
    #: A batch, and its subscription; '': that of the run's own trainer, or any with such a batch.
    batch: int | None = None
    subscription: str = ""


def asked_of(text: str) -> Asked:
    """Parse a target; ConfigError if ``text`` is none."""
    if found := _JOB.fullmatch(text):
        return Asked(job=text)
    if found := _PROMPT.fullmatch(text):
        return Asked(dataset=found[1], line=int(found[2]))
    if (found := _BATCH.fullmatch(text)) and (found[1] is None or is_name(found[1])):
        return Asked(batch=int(found[2]), subscription=found[1] or "")
    try:
        job, _, _ = key_of(text)
    except ConfigError:
        job = ""
    if not _JOB.fullmatch(job):
        raise ConfigError(
            f"{text!r} is nothing that can be traced: write a job (DATASET/EPOCH/LINE), a sample "
            "(DATASET/EPOCH/LINE/K), a prompt (DATASET/LINE) or a batch (N, or SUBSCRIPTION:N)."
        )
    return Asked(job=job, sample=text)


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
