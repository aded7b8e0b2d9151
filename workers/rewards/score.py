"""Rewards of samples behind one async interface; a failure has a named outcome, never a number (T11).

A reward is built in (kinds/), or ``module:function`` of the user. A job's own reward overrides the run's if the
worker's configuration names it: nothing else is imported. With ``reward.pool.kind: rq`` all but the quick built-in ones
are computed by the verifier pool (pool/client.py).
"""

import logging
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import RewardConfig
from penstock.config.hooks import BOXED
from penstock.config.reward import OverlongConfig
from penstock.errors import ConfigError, RewardError
from penstock.hooks.slime import PartRewards
from penstock.names import PART_REWARDS, STEP_REWARDS, Lane
from penstock.payloads.format import are_step_rewards
from penstock.records.job import Job, JobFailure
from penstock.records.sample import Sample
from penstock.records.worker_causes import CodeCalled
from penstock.system.user_code import bounded
from penstock.text import MASK, safe_repr
from penstock.workers.hooks.open_calls import CODE, calling
from penstock.workers.hooks.read_back import read_seen
from penstock.workers.hooks.recorded_engine import Repeats
from penstock.workers.rewards.allowed import import_reward
from penstock.workers.rewards.calls import NotJudged, awaiting, patiently, tried
from penstock.workers.rewards.child.client import RewardProcess
from penstock.workers.rewards.group_reward import GroupReward
from penstock.workers.rewards.jail.detect import check_jail
from penstock.workers.rewards.judges import Judges, takes_judges
from penstock.workers.rewards.kinds.boxed import last_box
from penstock.workers.rewards.kinds.kind import Kind, Question
from penstock.workers.rewards.kinds.registry import NAMES, check_packages, is_quick, is_remote, kind_of, needs_jail
from penstock.workers.rewards.outcomes import MAX_REWARD, keyed, number_of, words
from penstock.workers.rewards.processes import CHECK_CPU_S, CheckProcesses
from penstock.workers.rewards.service import Service, ServiceFailed

if TYPE_CHECKING:
    from penstock.workers.rewards.pool.client import Checks

log = logging.getLogger(__name__)

TOKEN_REWARDS = "token_rewards"

#: Index of a token of the response -> the reward of the step that ends with it.
Steps = dict[int, float]


def take_out(info: dict[str, Any], sample: Sample, name: str) -> Steps | None:
    """Remove the step rewards from ``info``, a reward's entries, and return them; None if it has none.

        {"score": 1.0, "step_rewards": [[12, 0.5], [40, 1.0]]}     steps that end with tokens 12 and 40 of the response
        {"score": 1.0, "token_rewards": [0.0, 0.1, ...]}           every token of the response is a step

    They become the side array ``step_rewards`` of the sample.

    Raises:
        RewardError: reward_not_a_number if they are not finite numbers for tokens of the response, in order.
    """
    found = {key: info.pop(key) for key in (STEP_REWARDS, TOKEN_REWARDS) if key in info}
    if not found:
        return None
    what = f"sample {sample.id}: reward {name} gave"
    if len(found) == 2:
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER, f"{what} {STEP_REWARDS} and {TOKEN_REWARDS}: give one of them."
        )
    length = len(sample.tokens) - sample.prompt_length
    ((key, value),) = found.items()
    pairs = _pairs_of_tokens(value, length) if key == TOKEN_REWARDS else _pairs(value, length)
    if pairs is None:
        like = f"one finite number for each of the {length} tokens of its response"
        if key == STEP_REWARDS:
            like = f"pairs of a token's index in its response, below {length} and rising, and a finite number"
        raise RewardError(JobFailure.REWARD_NOT_A_NUMBER, f"{what} {key} {safe_repr(value)}, which are not {like}.")
    return dict(pairs)


def keep(sample: Sample, steps: Steps | None) -> None:
    """Set the sample's side array of step rewards; if ``steps`` is None, check the one user code may have set.

    Raises:
        RewardError: reward_not_a_number if it is invalid: a trainer would stop at its whole batch.
    """
    if steps is not None:
        sample.sides[STEP_REWARDS] = as_array(steps)
    if (side := sample.sides.get(STEP_REWARDS)) is None:
        return
    length = len(sample.tokens) - sample.prompt_length
    array = np.asarray(side)
    if not are_step_rewards(array, length):
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER,
            f"sample {sample.id}: its side array {STEP_REWARDS!r} of shape {array.shape} is not [steps, 2], the "
            f"index of a token of its response, below {length} and rising, and a finite number.",
        )


def added(steps: Steps, more: Steps, weight: float) -> Steps:
    """Return the sum of ``steps`` and ``weight`` times those of another part of the reward."""
    return steps | {at: steps.get(at, 0.0) + weight * number for at, number in more.items()}


def as_array(steps: Steps) -> NDArray[np.float32]:
    """[S, 2] Return index and reward of each step, in order."""
    with np.errstate(over="ignore"):  # infinite then, and refused
        return np.array(sorted(steps.items()), np.float32).reshape(len(steps), 2)


def _pairs_of_tokens(value: Any, length: int) -> list[tuple[int, float]] | None:
    if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
        return None
    return [(at, float(number)) for at, number in enumerate(value)]


def _pairs(value: Any, length: int) -> list[tuple[int, float]] | None:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        return None
    indices = [one[0] for one in value]
    if not all(type(at) is int and 0 <= at < length for at in indices) or not all(_is_number(one[1]) for one in value):
        return None
    if any(later <= earlier for earlier, later in pairwise(indices)):
        return None
    return [(at, float(number)) for at, number in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_REWARD  # nan is not, nor is a huge integer


def overlong(num_tokens: int, config: OverlongConfig) -> float:
    """Return the Soft Overlong Punishment, from 0 to ``-factor``, of an answer of ``num_tokens`` generated tokens.

    With L = ``max_tokens`` and C = ``buffer_tokens``: 0 up to L - C, ((L - C) - num_tokens) / C up to L, then -1; times
    ``factor``. Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation 13.
    """
    if config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -config.factor * min(max(over / config.buffer_tokens, 0.0), 1.0)


#: Metadata entry of a prompt that names its reward (slime's).
BY_METADATA = "rm_type"


def chosen(job: Job, config: RewardConfig) -> Mapping[str, float]:
    """Return reward -> weight for samples of a job: the job's own; else the run's if it is a user function; else the
    one named in the metadata (``reward.by_metadata``); else the run's. Imports nothing.

    Raises:
        ConfigError: the metadata name a reward that is not built in.
    """
    if job.reward:
        return {job.reward: 1.0}
    if config.by_metadata and all(name in NAMES for name in config.names) and (named := _named(job)):
        return {named: 1.0}
    return config.parts or {config.function: 1.0}


def _named(job: Job) -> str:
    """Return the reward named in the metadata; '' if there is no such entry."""
    found = job.metadata.get(BY_METADATA)
    name = found.strip() if isinstance(found, str) else found
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in NAMES:
        raise ConfigError(
            f"job {job.id}: {BY_METADATA} {safe_repr(found)} of its metadata is no reward of penstock's "
            "own: correct it, "
            "or name a function of yours as the dataset's reward, or set reward.by_metadata: false."
        )
    return name


#: Scores one sample: a number, or a dict with one under ``RewardConfig.key``.
RewardFunction = Callable[[Sample], Awaitable[Any]]


class _Found(NamedTuple):
    """The result of one reward for a sample."""

    number: float
    info: dict[str, Any]
    of_steps: Steps | None


class Rewards:
    """Scores samples of one worker.

    Args:
        checks: client of the verifier pool; None: rewards are computed here.
        allowed: rewards that jobs may name beside the run's and the built-in ones, from the worker's own configuration.
            Jobs come from Redis, and a client of that Redis must not choose what is imported here.
        args: first argument of functions with slime's signature; None: empty.
        waits: wait without limit for unreachable judges.

    Raises:
        ConfigError: the run's reward, or one of ``allowed``, does not exist, or needs a package that is not installed.
    """

    def __init__(
        self,
        config: RewardConfig,
        checks: "Checks | None" = None,
        allowed: Collection[str] = (),
        args: Namespace | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.config = config
        self._args = args
        self.checks = checks
        #: Processes of slow built-in rewards; None before the first check.
        self.processes: CheckProcesses | None = None
        self._service = Service(config.remote, "reward.remote")
        #: Judges for rewards, and for environments of the same worker.
        self.judges = Judges(config.judges, waits=waits)
        self.group = GroupReward(config, self.judges, args)
        self._repeats = Repeats()
        #: Process of rewards given by import path, with ``own_process``.
        self._process: RewardProcess | None = None
        self._in_process: set[str] = set()
        if config.own_process:
            self._process = RewardProcess(args or Namespace(), timeout_s=config.timeout_s, key=config.key)
        if checks is None:
            check_packages((*config.names, *allowed))
            if needs_jail((*config.names, *allowed)):
                log.info("programs of answers run in a jail: %s", check_jail(config))
        own = [name for name in NAMES if checks is None or is_quick(name)]
        if MASK in (config.remote.url or "") and any(map(is_remote, (*config.names, *allowed))):
            raise ConfigError(
                "reward.remote.url is masked in this file: give it again, as PENSTOCK_REWARD__REMOTE__URL."
            )
        if config.remote.url is None or MASK in config.remote.url:
            own = [name for name in own if not is_remote(name)]
        names = dict.fromkeys((*config.names, *allowed, *own))
        #: Rewards that call judges run in the worker's loop, with a verifier pool too: they wait and compute nothing.
        self._with_judges: set[str] = set()
        self._functions = {name: self._load(name) for name in names}

    async def score(self, sample: Sample) -> None:
        """Set ``reward``, ``reward_info`` and ``reward_s`` of the sample, and its side array of step rewards.

        Waits for at most ``timeout_s`` per attempt and part, besides waits for a free verifier of the pool, and for
        unreachable judges.
        With several parts ``reward_info`` has the number of each (``parts``), and its other entries (``said``).

        A bool counts as 1 or 0. A reward that raises has ``max_attempts``; a timeout, a result that is not a finite
        number, and a quick built-in reward that refuses the label, are not retried.

        Raises:
            ConfigError: as :meth:`check`.
            RewardError: ``outcome`` is reward_raised, reward_timeout, reward_not_a_number or reward_too_large; the
                sample is unchanged except for ``reward_s``.
        """
        started = time.monotonic()
        self.check(sample.job)
        try:
            found = await self._sum(sample, chosen(sample.job, self.config))
            number, info = self._shaped(sample, found.number, found.info)
            keep(sample, found.of_steps)
            sample.reward, sample.reward_info = number, info
        finally:
            sample.reward_s = time.monotonic() - started

    def take(self, sample: Sample) -> None:
        """Validate a reward that a hook or an environment has set, like that of a reward function.

        Raises:
            RewardError: reward_not_a_number, reward_too_large.
        """
        what = "that was set on it"
        number, info = self._read(sample, sample.reward, what)
        info = sample.reward_info | info
        keep(sample, take_out(info, sample, what))
        sample.reward, sample.reward_info = number, info

    async def close(self) -> None:
        """End the processes of slow rewards; withdraw open checks from the pool."""
        if self.checks is not None:
            await self.checks.close()
        await self._service.close()
        await self.judges.close()
        if self._process is not None:
            await self._process.close()
        if self.processes is not None:
            await self.processes.close()
            self.processes = None

    async def _sum(self, sample: Sample, parts: Mapping[str, float]) -> _Found:
        found = {name: await self._one(sample, name) for name in parts}
        if list(parts.values()) == [1.0]:
            return next(iter(found.values()))
        total = sum(weight * found[name].number for name, weight in parts.items())
        said = {name: one.info for name, one in found.items() if one.info}
        about = {"parts": {name: one.number for name, one in found.items()}, **({"said": said} if said else {})}
        of_steps: Steps | None = None
        for name, weight in parts.items():
            if (more := found[name].of_steps) is not None:
                of_steps = added(of_steps or {}, more, weight)
        key = self.config.key
        return _Found(*number_of({**about, key: total}, sample.id, "+".join(parts), key), of_steps)

    async def _one(self, sample: Sample, name: str) -> _Found:
        value = await self._try(self._functions[name], sample, name)
        number, info = self._read(sample, value, name)
        return _Found(number, info, take_out(info, sample, name))

    def _read(self, sample: Sample, value: Any, name: str) -> tuple[float, dict[str, Any]]:
        """Return the number and the fields of a reward: of those of several parts the mean, kept with each of them.

        Raises RewardError as ``number_of``.
        """
        if not isinstance(value, PartRewards):
            return number_of(value, sample.id, name, self.config.key)
        found = [number_of(one, sample.id, name, self.config.key) for one in value]
        rewards = [number for number, _ in found]
        sample.sides[PART_REWARDS] = np.array(rewards, np.float64)
        about: dict[str, Any] = {"part_rewards": rewards, self.config.key: fmean(rewards)}
        if any(info for _, info in found):
            about["part_info"] = [info for _, info in found]
        return number_of(about, sample.id, name, self.config.key)

    def _shaped(self, sample: Sample, number: float, info: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        if self.config.overlong.max_tokens is None or sample.job.lane != Lane.TRAIN:
            return number, info
        lost = overlong(sum(sample.generated), self.config.overlong)
        about = {**info, "overlong": lost, self.config.key: number + lost}
        return number_of(about, sample.id, "with reward.overlong", self.config.key)

    async def _try(self, function: RewardFunction, sample: Sample, name: str) -> Any:
        async def work() -> Any:
            # A verifier has its own time limit, from its start; so has a service.
            if not self._is_local(name) or is_remote(name):
                return await function(sample)
            with calling(CODE, CodeCalled("reward", name, "sample", sample.id)):
                if name in self._in_process:
                    return await function(sample)
                return await patiently(lambda: self._call(function, sample, name), self.judges)

        return await tried(work, f"sample {sample.id}", name, self.config, self._repeats)

    async def _call(self, function: RewardFunction, sample: Sample, name: str) -> Any:
        passes = (RewardError,) if kind_of(name) else (NotJudged,)
        return await bounded(lambda: function(sample), self.config.timeout_s, f"reward {sample.id}", passes)

    def _is_local(self, name: str) -> bool:
        return self.checks is None or is_quick(name) or name in self._with_judges

    def check(self, job: Job) -> None:
        """Raise ConfigError if a job names a reward that this worker may not run. Imports nothing."""
        for name in chosen(job, self.config).keys() - self._functions.keys():
            raise ConfigError(
                f"job {job.id} names reward {safe_repr(name)}, and a worker imports only what its own configuration "
                "names: add it to worker.rewards, if it is yours, and start the workers again."
            )

    def _load(self, name: str) -> RewardFunction:
        if is_remote(name):
            return self._remote(is_boxed=name.startswith(BOXED))
        kind = kind_of(name)
        # Without judges no function calls one, and functions of the pool are not imported here.
        function = import_reward(name, self._args) if kind is None and (self.checks is None or self.judges) else None
        if function is not None and self.checks is not None and takes_judges(function):
            self._with_judges.add(name)
        elif self.checks is not None and (kind is None or kind.is_slow):
            return self.checks.asking(name)
        if kind is None:
            assert function is not None
            if self._process is not None and not takes_judges(function):
                self._in_process.add(name)
                return self._process.asking(name)
            return self._user(function, name)
        return self._slow(name) if kind.is_slow else self._quick(kind, name)

    def _user(self, function: Callable[..., Any], name: str) -> RewardFunction:
        """Call a user function with a copy of the sample."""
        as_async: RewardFunction = awaiting(function, name, lambda one: f"sample {one.id}", self.judges)

        async def call(sample: Sample) -> Any:
            given = sample.copy_for_user()
            value = await as_async(given)
            read_seen(given, sample)
            return value

        return call

    def _quick(self, kind: Kind, name: str) -> RewardFunction:
        async def call(sample: Sample) -> Any:
            try:
                return keyed(kind.judge(Question.of(sample)), self.config.key)
            # It is deterministic: a retry would fail too.
            except ValueError as exc:
                raise RewardError(JobFailure.REWARD_RAISED, f"sample {sample.id}: reward {name} {words(exc)}") from exc

        return call

    def _remote(self, is_boxed: bool) -> RewardFunction:
        """Ask the service at ``reward.remote.url``, an address of the run's own configuration."""

        async def call(sample: Sample) -> Any:
            job, text = sample.job, (last_box(sample.text) or "") if is_boxed else sample.text
            prompt = job.prompt if job.prompt is not None else job.prompt_ids
            question = {"prompt": prompt, "response": text, "label": job.raw_label}
            try:
                return await self._service.ask(self.config.remote.url or "", question)
            except ServiceFailed as exc:
                raise RewardError(exc.outcome, f"sample {sample.id}: remote_rm: {exc}.") from exc

        return call

    def _slow(self, name: str) -> RewardFunction:
        async def call(sample: Sample) -> Any:
            if self.processes is None:
                check_packages([name])
                self.processes = CheckProcesses(self.config.pool.workers, cpu_s=CHECK_CPU_S, config=self.config)
            return keyed(await self.processes.check(name, Question.of(sample)), self.config.key)

        return call
