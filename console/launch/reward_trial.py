"""Apply a reward to existing samples, those of a run or of a file: ``penstock reward try``.

Nothing is generated and nothing is written. Rewards run in this process, even those of a verifier pool.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import uvloop
from pydantic import ValidationError

from penstock.config import Config, DatasetConfig, RewardConfig
from penstock.config.reading.validation_errors import explain
from penstock.console.launch.trial import until_stopped
from penstock.errors import ConfigError, RewardError
from penstock.history.row import WHOLE_JOB, SampleRow, place_of
from penstock.names import Lane
from penstock.producer.sources.jsonl import JsonLines
from penstock.producer.sources.registry import open_rows
from penstock.producer.sources.rows import BadLine, Rows
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.system.user_code import run_through, staying_alive
from penstock.text import redact
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.score import Rewards

#: Largest difference of equal rewards: they are float64, and metrics round.
SAME = 1e-6
#: Name of the failure of a job that names a reward which it may not use.
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded answer."""

    sample: Sample
    #: Its recorded reward; None: it had none.
    then: float | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer and its new reward."""

    id: str
    #: None: it was given as token ids, or was not recorded.
    prompt: str | None
    response: str
    label: Any
    then: float | None
    #: None if the reward failed; ``failure`` says why.
    now: float | None
    #: Additional values returned by the reward.
    info: dict[str, Any]
    seconds: float
    #: Name of the failure, and a sentence that describes it; '' on success.
    failure: str = ""
    error: str = ""

    @property
    def differs(self) -> bool:
        """Return whether its reward differs from the recorded one."""
        return self.then is not None and self.now is not None and abs(self.now - self.then) > SAME


@dataclass(frozen=True, slots=True)
class Summary:
    """Aggregate of all answers."""

    samples: int
    scored: int
    #: Mean new reward, of those that have one.
    mean: float | None
    #: Mean recorded reward, of the ``had`` that have a recorded and a new one.
    mean_then: float | None
    had: int
    #: Number of answers whose rewards differ.
    differ: int
    #: Samples by the name of their failure.
    failures: dict[str, int] = field(default_factory=dict)


def rewards_of(config: Config | None, function: str) -> tuple[RewardConfig, frozenset[str]]:
    """Return section ``reward``, its function replaced by ``function`` if given; and the rewards that jobs may name.

    Raises:
        ConfigError: no such reward, or one of its requirements is missing.
    """
    if not function:
        return (config.reward, allowed_rewards(config)) if config else (RewardConfig(), frozenset())
    values = config.reward.model_dump(exclude={"parts", "by_metadata"}) if config else {}
    try:
        return RewardConfig.model_validate({**values, "function": function}), frozenset()
    except ValidationError as exc:
        reasons = "; ".join(explain(error) for error in exc.errors())
        raise ConfigError(f"--function {function} cannot be tried: {reasons.rstrip('.')}.") from None


def of_file(path: Path) -> Iterator[Recorded]:
    """Yield answers from a file of JSON lines: ``prompt``, ``response``, ``label``, and optionally ``reward`` (the
    recorded one), ``metadata`` and ``id``.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; names the line.
    """
    if not path.is_file():
        raise ConfigError(f"--file: there is no file {path}; correct the path.")
    lines = JsonLines(path, "--file")
    if not len(lines):
        raise ConfigError(f"--file: {path} holds no answer: give lines of prompt, response and label.")
    for number in range(len(lines)):
        where = f"{path}, line {number + 1}"
        row = lines.row(number)
        response, metadata, then = row.get("response"), row.get("metadata") or {}, row.get("reward")
        if not isinstance(response, str):
            raise ConfigError(f"{where}: `response` is the text of an answer: give one.")
        if not isinstance(metadata, dict):
            raise ConfigError(f"{where}: `metadata` is no map: correct it, or leave it out.")
        if then is not None and (isinstance(then, bool) or not isinstance(then, int | float)):
            raise ConfigError(f"{where}: `reward` is no number: correct it, or leave it out.")
        job = _job(str(row.get("id") or f"{path.stem}/0/{number}"), row.get("prompt"), row.get("label", ""), metadata)
        yield Recorded(Sample(job, 0, text=response, turns=[response]), None if then is None else float(then))


def of_run(rows: Iterable[SampleRow], config: Config | None, *, own_rewards: bool = True) -> Iterator[Recorded]:
    """Yield answers that a run has recorded. Metadata and full labels are read from its datasets, if they exist.

    Args:
        own_rewards: use the reward of a sample's dataset, if it has one.
    """
    sets = {one.name: _Lines(one) for one in (*config.data.train, *config.data.eval)} if config else {}
    for _, some in groupby(rows, key=lambda row: (row.job, row.k)):
        row, *more = some
        # A reward judges all parts of a sample.
        if more or row.k == WHOLE_JOB or row.lane == Lane.SCORE or (not row.answer and row.tokens is None):
            continue
        dataset, _, line = place_of(row.job)
        found = sets.get(dataset)
        label, metadata = found.of(line, row.label) if found else (row.label, {})
        job = _job(row.job, row.prompt, label, metadata, row.lane)
        if found and own_rewards:
            job = replace(job, reward=found.config.reward)
        yield Recorded(_sample(row, job), row.reward)


def score(
    config: RewardConfig,
    allowed: Collection[str],
    recorded: Sequence[Recorded],
    tell: Callable[[int], None] = lambda done: None,
) -> list[Scored]:
    """Apply the reward to each answer; return results in the same order. Blocks until the last is scored.

    Args:
        allowed: rewards that a dataset may name besides the run's.
        tell: called with the number of scored answers.

    Raises:
        ConfigError: the reward does not exist, or needs a package that is not installed.
        KeyboardInterrupt: interrupted by a signal.
    """
    try:
        with staying_alive():
            return run_through(until_stopped(_score(config, allowed, recorded, tell)), uvloop.new_event_loop)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def summarize(rows: Sequence[Scored]) -> Summary:
    """Compute means, differences and failures."""
    scored = [row for row in rows if row.now is not None]
    return Summary(
        samples=len(rows),
        scored=len(scored),
        mean=_mean([row.now for row in scored]),
        mean_then=_mean([row.then for row in scored]),
        had=sum(row.then is not None for row in scored),
        differ=sum(row.differs for row in scored),
        failures=dict(sorted(Counter(row.failure for row in rows if row.failure).items())),
    )


async def _score(
    config: RewardConfig, allowed: Collection[str], recorded: Sequence[Recorded], tell: Callable[[int], None]
) -> list[Scored]:
    rewards = Rewards(config, None, allowed)
    # No check waits for a process within its time.
    free, done = asyncio.Semaphore(config.pool.workers), 0

    async def one(given: Recorded) -> Scored:
        nonlocal done
        async with free:
            row = await _one(rewards, given)
        done += 1
        tell(done)
        return row

    try:
        return list(await asyncio.gather(*map(one, recorded)))
    finally:
        await rewards.close()


async def _one(rewards: Rewards, given: Recorded) -> Scored:
    sample, failure, error = given.sample, "", ""
    try:
        await rewards.score(sample)
    except RewardError as exc:
        failure, error = str(exc.outcome), redact(str(exc))
    except ConfigError as exc:
        failure, error = REFUSED, redact(str(exc))
    return Scored(
        sample.id, sample.job.prompt, sample.text, sample.job.raw_label, given.then, sample.reward,
        sample.reward_info, sample.reward_s, failure, error,
    )  # fmt: skip


class _Lines:
    """Labels and metadata of one dataset by line, if it can still be read."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self._rows: Rows | None = None
        self._is_gone = False

    def of(self, line: int, label: str) -> tuple[Any, dict[str, Any]]:
        """Return label and metadata of a line; ``label`` and {} if the line's label has changed since."""
        row = self._row(line)
        if row is None:
            return label, {}
        whole = row.get(self.config.label_key, "") if self.config.label_key else ""
        # Only the beginning of a long label is recorded.
        if not _as_text(whole).startswith(label):
            return label, {}
        metadata = row.get(self.config.metadata_key) if self.config.metadata_key else None
        return whole, metadata if isinstance(metadata, dict) else {}

    def _row(self, line: int) -> dict[str, Any] | None:
        if self._is_gone:
            return None
        try:
            if self._rows is None:
                self._rows = open_rows(self.config)
            return self._rows.row(line) if 0 <= line < len(self._rows) else None
        except BadLine:
            return None
        except ConfigError:
            self._is_gone = True
            return None


def _job(id_: str, prompt: Any, label: Any, metadata: dict[str, Any], lane: str = Lane.TRAIN) -> Job:
    return Job(
        id_,
        1,
        prompt=prompt if isinstance(prompt, str) or prompt is None else json.dumps(prompt, ensure_ascii=False),
        label=_as_text(label),
        label_value=None if isinstance(label, str) else label,
        metadata=metadata,
        lane=lane,
    )


def _sample(row: SampleRow, job: Job) -> Sample:
    sample = Sample(job, row.k, text=row.answer, turns=[row.answer], status=row.status, finish_reason=row.finish_reason)
    sample.prompt_length, sample.num_turns = row.prompt_length, row.num_turns
    if row.tokens is None or row.generated is None:
        sample.generated = [1] * row.num_generated
        return sample
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions"):
        if (array := getattr(row, name)) is not None:
            setattr(sample, name, array.tolist())
    return sample


def _as_text(label: Any) -> str:
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
