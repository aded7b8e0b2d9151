"""Try prompts without a queue (``penstock check --try N``), and rewards on existing answers (``penstock reward try``).

The engine is the run's own, with the weights of ``model.path``: one that is started and ended here, or the one at
``engine.url``. Rewards run in this process, even those of a verifier pool. Nothing is written but the engine's log, in
a temporary folder.
"""

import asyncio
import json
import math
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvloop
from pydantic import ValidationError

from penstock.config import Config, DatasetConfig, RewardConfig
from penstock.config.reading.validation_errors import explain
from penstock.errors import ConfigError, PenstockError, RewardError
from penstock.history.row import WHOLE_JOB, SampleRow, place_of
from penstock.hooks.slime import args_of
from penstock.model.tokenizer import load_tokenizer
from penstock.names import AGENT, Lane
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import MAX_EARLY_LINES, HeldOut
from penstock.producer.main import chat_template
from penstock.producer.mixture import mixture_of
from penstock.producer.offers import Offers
from penstock.producer.sources.jsonl import JsonLines
from penstock.producer.sources.registry import open_rows
from penstock.producer.sources.rows import BadLine, Rows
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample
from penstock.system.user_code import run_through, staying_alive
from penstock.text import redact
from penstock.workers.engine import Engine
from penstock.workers.hooks.maker import GenerateHooks
from penstock.workers.hooks.sample_hooks import SampleHooks
from penstock.workers.jobs.environments import Environments, allowed_environments
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.score import Rewards
from penstock.workers.router.members import make_engine

#: Seconds between two reports of the engine's start.
LOOK_S = 0.5

T = TypeVar("T")
Row = dict[str, Any]

#: Called with the number of finished answers, and the current activity.
Tell = Callable[[int, str], None]


def try_prompts(config: Config, count: int, gpus: Sequence[str], tell: Tell) -> list[Row]:
    """Answer the first ``count`` prompts of the training data once each. Blocks for the engine's start and the answers.

    Args:
        gpus: names of the GPUs visible to the engine; empty: all.
        tell: called repeatedly with the progress.

    Returns:
        a row per prompt, with the columns of ``resources.TRIED``.

    Raises:
        ConfigError: the run's configuration does not allow it, or the engine cannot start with it.
        EngineError: the engine did not start.
        KeyboardInterrupt: interrupted by a signal; everything has been ended.
    """
    if config.fleet.models:
        raise ConfigError(
            "--try asks one engine, and the engines of this run are a fleet's: name one of them as engine.url, without "
            "fleet.models."
        )
    jobs = _jobs(config, count)
    folder = Path(tempfile.mkdtemp(prefix="penstock-try-"))
    told = ""
    try:
        rows = run_interruptibly(_try(config, jobs, folder, gpus, tell))
        told = "".join(row["error"] for row in rows)
    except PenstockError as exc:
        told = str(exc)
        raise
    finally:
        # Keep the engine's log if a message refers to it.
        if str(folder) not in told:
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def run_interruptibly(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, which calls user code, to its end. Blocks; raises KeyboardInterrupt if a signal ended it."""
    try:
        with staying_alive():
            return run_through(until_stopped(work), uvloop.new_event_loop)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _jobs(config: Config, count: int) -> list[Job]:
    """Return the jobs that the producer would admit first."""
    template = chat_template(config)
    source = mixture_of([Dataset(one, template) for one in config.data.train], config.seed)
    offers = Offers(config, source, HeldOut([]))
    # At most all lines are skipped; the length of a stream is unknown.
    offered = map(offers.at, range(count + (source.num_lines or MAX_EARLY_LINES)))
    return list(islice((one for one in offered if isinstance(one, Job)), count))


async def until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, cancelled by SIGINT and SIGTERM; a second signal interrupts user code that blocks the loop."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    asked = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return await task
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _try(config: Config, jobs: Sequence[Job], folder: Path, gpus: Sequence[str], tell: Tell) -> list[Row]:
    # No second lease would continue an answer that exceeds the first one's tokens.
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"lease_tokens": None})})
    rewards = Rewards(config.reward, None, allowed_rewards(config), args_of(config))
    environments = Environments(allowed_environments(config), rewards.judges)
    makers, hooks = GenerateHooks(config), SampleHooks(config)
    tokenizer = load_tokenizer(config.model.path)
    done: list[Row] = []
    async with _engine(_seeing(config, gpus), folder, tell) as engine:
        slots = asyncio.Semaphore(config.worker.slots)

        async def one(job: Job) -> Row:
            async with slots:
                row = await _draw(
                    Source(engine, Valves(), tokenizer, config.rollout), rewards, environments, makers, hooks, job
                )
            done.append(row)
            tell(len(done), "")
            return row

        try:
            return list(await asyncio.gather(*map(one, jobs)))
        finally:
            await rewards.close()


def _seeing(config: Config, gpus: Sequence[str]) -> Config:
    if not gpus or config.engine.url is not None:
        return config
    env = {**config.engine.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return config.model_copy(update={"engine": config.engine.model_copy(update={"env": env})})


@asynccontextmanager
async def _engine(config: Config, folder: Path, tell: Tell) -> AsyncIterator[Engine]:
    """Start an engine as a worker does, with the model's own weights; end it after the ``async with``."""
    engine = make_engine(config, "try", folder)
    telling = asyncio.create_task(_tell_start(engine, tell))
    try:
        try:
            await engine.start()
        finally:
            telling.cancel()
        yield engine
    finally:
        await asyncio.shield(engine.stop())


async def _tell_start(engine: Engine, tell: Tell) -> None:
    while True:
        phase = await asyncio.to_thread(engine.phase)
        tell(0, f"engine: {phase.progress or 'starting'}")
        await asyncio.sleep(LOOK_S)


async def _draw(
    source: Source, rewards: Rewards, environments: Environments, makers: GenerateHooks, hooks: SampleHooks, job: Job
) -> Row:
    """Generate one answer, or use one that the data gives, and score it."""
    sample, error = Sample(job, len(job.answers)), ""
    try:
        if job.environment == AGENT:
            raise ConfigError(f"dataset {job.dataset} is run by agents, and a trial has none: start the run instead.")
        environment = environments.make(job)
        if (maker := makers.of(job)) is None:
            await generate_sample(source, sample, environment=environment)
        else:
            await maker.make(source, [sample], [Drawn()])
        await hooks.apply(sample)
        if sample.reward is None:
            await rewards.score(sample)
        else:
            rewards.take(sample)
    except PenstockError as exc:
        error = redact(str(exc))
    prompt = job.prompt
    return {
        "job": job.id,
        "prompt": source.tokenizer.decode(list(job.prompt_ids or ())) if prompt is None else prompt,
        "answer": sample.text,
        "reward": sample.reward,
        "reward_info": sample.reward_info,
        "num_generated": sum(sample.generated),
        "num_turns": sample.num_turns,
        "finish_reason": sample.finish_reason,
        "generate_s": sample.generate_s,
        "reward_s": sample.reward_s,
        "error": error,
    }


#: Largest difference of equal rewards: they are float64, and metrics round.
SAME = 1e-6
#: Name of the failure of a job that names a reward which it may not use.
REFUSED = "refused"


#: A recorded answer, and its recorded reward; None: it had none.
Recorded = tuple[Sample, float | None]


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
            raise ConfigError(f"{where}: `response` must be the text of an answer.")
        if not isinstance(metadata, dict):
            raise ConfigError(f"{where}: `metadata` must be a map: correct or remove it.")
        if then is not None and (isinstance(then, bool) or not isinstance(then, int | float)):
            raise ConfigError(f"{where}: `reward` must be a number: correct or remove it.")
        job = _job_of(
            str(row.get("id") or f"{path.stem}/0/{number}"), row.get("prompt"), row.get("label", ""), metadata
        )
        yield Sample(job, 0, text=response, turns=[response]), None if then is None else float(then)


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
        job = _job_of(row.job, row.prompt, label, metadata, row.lane)
        if found and own_rewards:
            job = replace(job, reward=found.config.reward)
        yield _sample(row, job), row.reward


def score(
    config: RewardConfig,
    allowed: Collection[str],
    recorded: Sequence[Recorded],
    tell: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Apply the reward to each answer; return a row of ``resources.SCORED`` for each, in the same order. Blocks.

    Args:
        allowed: rewards that a dataset may name besides the run's.
        tell: called with the number of scored answers.

    Raises:
        ConfigError: the reward does not exist, or needs a package that is not installed.
        KeyboardInterrupt: interrupted by a signal.
    """
    return run_interruptibly(_score(config, allowed, recorded, tell))


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the number of ``samples`` and of ``scored`` ones, means, and ``failures``: samples by name of the failure.

    ``mean`` is the mean new reward; ``mean_then`` the mean recorded reward of the ``had`` samples that have both, of
    which ``differ`` differ.
    """
    scored = [row for row in rows if row["now"] is not None]
    then = [row["then"] for row in scored if row["then"] is not None]
    return {
        "samples": len(rows),
        "scored": len(scored),
        "mean": _mean([row["now"] for row in scored]),
        "mean_then": _mean(then),
        "had": len(then),
        "differ": sum(row["differs"] for row in scored),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
    }


async def _score(
    config: RewardConfig, allowed: Collection[str], recorded: Sequence[Recorded], tell: Callable[[int], None]
) -> list[Row]:
    rewards = Rewards(config, None, allowed)
    # No check waits for a process within its time.
    free, done = asyncio.Semaphore(config.pool.workers), 0

    async def one(sample: Sample, then: float | None) -> Row:
        nonlocal done
        async with free:
            row = await _score_one(rewards, sample, then)
        done += 1
        tell(done)
        return row

    try:
        return list(await asyncio.gather(*(one(*given) for given in recorded)))
    finally:
        await rewards.close()


async def _score_one(rewards: Rewards, sample: Sample, then: float | None) -> Row:
    failure = error = ""
    try:
        await rewards.score(sample)
    except RewardError as exc:
        failure, error = str(exc.outcome), redact(str(exc))
    except ConfigError as exc:
        failure, error = REFUSED, redact(str(exc))
    now = sample.reward
    return {
        "id": sample.id,
        "prompt": sample.job.prompt,
        "response": sample.text,
        "label": sample.job.raw_label,
        "then": then,
        "now": now,
        "info": sample.reward_info,
        "seconds": sample.reward_s,
        "failure": failure,
        "error": error,
        "differs": then is not None and now is not None and abs(now - then) > SAME,
    }


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


def _job_of(id_: str, prompt: Any, label: Any, metadata: dict[str, Any], lane: str = Lane.TRAIN) -> Job:
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


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
