"""The stages of a sample, from its admission to the step that trained it; and the sources of a run's traces."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.reading.yaml_file import read_yaml
from penstock.config.trainer import TrainerConfig
from penstock.consumers.grpo.rows import Row, read_rows
from penstock.errors import ConfigError, ProtocolError
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow, key_of
from penstock.names import is_name
from penstock.records.job import Try, tries_of
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.saved_config import CONFIG_FILE

_SPENT = ("wait_s", "step_s", "publish_s")
#: Upper limit of valid numbers: as a time, the year 5138.
_MOST = 1e11


@dataclass(frozen=True, slots=True)
class Step:
    """One step: it waited, trained and published, one after the other."""

    step: int
    batch: int
    #: Version of the batch, and the version published after it.
    version: int
    #: When it ended (Unix seconds).
    ended_s: float
    wait_s: float
    train_s: float
    publish_s: float
    #: Subscription that was trained; '' in rows of an earlier release.
    trainer: str = ""

    @property
    def published_from_s(self) -> float:
        return self.ended_s - self.publish_s

    @property
    def trained_from_s(self) -> float:
        return self.published_from_s - self.train_s

    @property
    def waited_from_s(self) -> float:
        return self.trained_from_s - self.wait_s


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of the run in ``folder``, by number; [] without any. Blocks for the disk."""
    return list(_steps(read_rows(folder).steps))


def trainer_of(folder: Path, steps: Sequence[Step]) -> str:
    """Return the subscription of the run's own trainer, by its last step or its configuration. Blocks for the disk."""
    if steps and steps[-1].trainer:
        return steps[-1].trainer
    try:
        section = read_yaml(folder / CONFIG_FILE).get("trainer")
    except (ConfigError, OSError):
        section = None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else str(TrainerConfig.model_fields["name"].default)


def _steps(rows: list[Row]) -> Iterator[Step]:
    for row in rows:
        numbers = {name: _finite(row.get(name)) for name in ("step", "batch", "version", "time_s")}
        if any(value is None for value in numbers.values()):
            continue
        step, batch, version, ended = (value or 0.0 for value in numbers.values())
        wait_s, train_s, publish_s = (max(0.0, _finite(row.get(name)) or 0.0) for name in _SPENT)
        name = row.get("trainer")
        trainer = name if isinstance(name, str) else ""
        yield Step(int(step), int(batch), int(version), ended, wait_s, train_s, publish_s, trainer)


def _finite(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < _MOST else None


#: Descriptions of the stages, in the order in which a sample goes through them; ``paused`` lies within prefill
#: and decode.
MEANING = {
    "queued": "its job waits for a worker",
    "starting": "leased, and waits for a slot or an earlier lease's end",
    "prefill": "at the engine, before its first token",
    "decode": "tokens are generated",
    "generate": "at the engine; when its first token came is not known",
    "paused": "held while weights changed or the engine was restarted",
    "reward": "its reward is computed",
    "commit": "written, and committed to the queue",
    "siblings": "waits for the other samples of its group, and for the reward of all of them",
    "cut": "waits to be cut into a batch",
    "train": "cut, until every rank had committed the batch",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a sample (Unix seconds)."""

    name: str
    begin_s: float
    end_s: float


def stages_of(row: SampleRow, tries: Sequence[Try]) -> list[Stage]:
    """Return the known stages of a sample, by time; a stage without its end, or of no length, is left out.

    Args:
        tries: attempts of its job.
    """
    return sorted(_known(row, tries), key=lambda one: (one.begin_s, -one.end_s))


def known_tries(row: SampleRow) -> list[Try]:
    """Return the attempts of a sample's job; [] if their record is unreadable."""
    try:
        return tries_of(row.tries, row.job, ready_s=row.ready_s)
    except ProtocolError:
        return []


def own_try(row: SampleRow, tries: Sequence[Try]) -> Try | None:
    """Return the lease under which a sample was committed; None if it is unknown."""
    own = [one for one in tries if one.worker == row.worker]
    held = [one for one in own if one.leased_s <= row.committed_s + 1.0] if row.committed_s else own
    return held[-1] if held else None


def begun_s(row: SampleRow, tries: Sequence[Try]) -> float:
    """Return the time of its first request to the engine (Unix seconds); 0: unknown."""
    if row.started_s:
        return row.started_s
    held = own_try(row, tries)
    return held.leased_s if held else row.leased_s


def _known(row: SampleRow, tries: Sequence[Try]) -> Iterator[Stage]:
    begun, first, drawn = begun_s(row, tries), row.first_token_s, row.drawn_s
    leased = tries[0].leased_s if tries else row.leased_s
    yield from _stage("queued", row.admitted_s, leased)
    yield from _stage("starting", leased, begun)
    if begun <= first <= drawn:
        yield from _stage("prefill", begun, first)
        yield from _stage("decode", first, drawn)
    else:
        yield from _stage("generate", begun, drawn)
    for begin, end in (pause for pause in row.pauses if len(pause) == 2):
        yield from _stage("paused", max(begin, begun), min(end, drawn))
    yield from _stage("reward", drawn, row.rewarded_s)
    yield from _stage("commit", row.rewarded_s or drawn, row.committed_s)
    yield from _stage("siblings", row.committed_s, row.ready_s)
    yield from _stage("cut", row.ready_s, row.cut_s)
    yield from _stage("train", row.cut_s, row.trained_s)


def _stage(name: str, begin_s: float, end_s: float) -> Iterator[Stage]:
    if 0 < begin_s < end_s:
        yield Stage(name, begin_s, end_s)


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
    """Parse a target; ConfigError if ``text`` is invalid."""
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
            f"cannot trace {text!r}: give a job (DATASET/EPOCH/LINE), a sample "
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
