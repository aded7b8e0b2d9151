"""Run a few prompts through engine, environment and reward, without a queue: ``penstock check --try N``.

The engine is the run's own, with the weights of ``model.path``: one that is started and ended here, or the one at
``engine.url``. Rewards run in this process, even those of a verifier pool. Nothing is written but the engine's log, in
a temporary folder.
"""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvloop

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError
from penstock.hooks.slime import args_of
from penstock.model.tokenizer import Tokenizer, load_tokenizer
from penstock.names import AGENT
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import MAX_EARLY_LINES, HeldOut
from penstock.producer.main import chat_template
from penstock.producer.mixture import mixture_of
from penstock.producer.offers import Offers
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample
from penstock.system.user_code import run_through, staying_alive
from penstock.text import redact
from penstock.workers.engine import Engine
from penstock.workers.hooks.maker import Makers
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

#: Called with the number of finished answers, and the current activity.
Tell = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt and its result."""

    job: str
    prompt: str
    answer: str
    #: None if it failed; ``error`` says why.
    reward: float | None
    #: Additional values returned by the reward.
    reward_info: dict[str, Any]
    #: Number of generated tokens.
    num_generated: int
    num_turns: int
    #: A ``FinishReason``; '' if it failed.
    finish_reason: str
    generate_s: float
    reward_s: float
    #: The failure, in a sentence; '' on success.
    error: str = ""


def try_prompts(config: Config, count: int, gpus: Sequence[str], tell: Tell) -> list[Trial]:
    """Answer the first ``count`` prompts of the training data once each. Blocks for the engine's start and the answers.

    Args:
        gpus: names of the GPUs visible to the engine; empty: all.
        tell: called repeatedly with the progress.

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
        with staying_alive():
            rows = run_through(until_stopped(_try(config, jobs, folder, gpus, tell)), uvloop.new_event_loop)
        told = "".join(row.error for row in rows)
    except PenstockError as exc:
        told = str(exc)
        raise
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        # Keep the engine's log if a message refers to it.
        if str(folder) not in told:
            shutil.rmtree(folder, ignore_errors=True)
    return rows


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


async def _try(config: Config, jobs: Sequence[Job], folder: Path, gpus: Sequence[str], tell: Tell) -> list[Trial]:
    # No second lease would continue an answer that exceeds the first one's tokens.
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"lease_tokens": None})})
    rewards = Rewards(config.reward, None, allowed_rewards(config), args_of(config))
    environments = Environments(allowed_environments(config), rewards.judges)
    makers, hooks = Makers(config), SampleHooks(config)
    tokenizer = load_tokenizer(config.model.path)
    done: list[Trial] = []
    async with _engine(_seeing(config, gpus), folder, tell) as engine:
        slots = asyncio.Semaphore(config.worker.slots)

        async def one(job: Job) -> Trial:
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
    source: Source, rewards: Rewards, environments: Environments, makers: Makers, hooks: SampleHooks, job: Job
) -> Trial:
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
    return _row(sample, source.tokenizer, error)


def _row(sample: Sample, tokenizer: Tokenizer, error: str) -> Trial:
    prompt = sample.job.prompt
    return Trial(
        job=sample.job.id,
        prompt=tokenizer.decode(list(sample.job.prompt_ids or ())) if prompt is None else prompt,
        answer=sample.text,
        reward=sample.reward,
        reward_info=sample.reward_info,
        num_generated=sum(sample.generated),
        num_turns=sample.num_turns,
        finish_reason=sample.finish_reason,
        generate_s=sample.generate_s,
        reward_s=sample.reward_s,
        error=error,
    )
