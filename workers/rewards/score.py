"""Rewards of samples behind one async interface; a failure has a named outcome, never a number (T11).

A reward is built in (kinds/), or ``module:function`` of the user. A job's own reward overrides the run's if the
worker's configuration names it: nothing else is imported. With ``reward.pool.kind: rq`` all but the quick built-in ones
are computed by the verifier pool (pool/client.py).
"""

import logging
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import RewardConfig
from penstock.config.code_names import BOXED
from penstock.errors import ConfigError, RewardError
from penstock.names import Lane
from penstock.protocol.records.causes import CodeCalled
from penstock.protocol.records.job import Job, JobFailure
from penstock.protocol.records.sample import Sample
from penstock.redaction import MASK
from penstock.system.user_code import bounded
from penstock.text import safe_repr
from penstock.workers.hooks.open_calls import CODE, calling
from penstock.workers.hooks.read_back import read_seen
from penstock.workers.hooks.repeats import Repeats
from penstock.workers.rewards import steps
from penstock.workers.rewards.allowed import import_reward
from penstock.workers.rewards.calls import NotJudged, awaiting, patiently
from penstock.workers.rewards.child.client import RewardProcess
from penstock.workers.rewards.choice import chosen
from penstock.workers.rewards.groups.reward import GroupReward
from penstock.workers.rewards.jail.asking import check_jail
from penstock.workers.rewards.judges import Judges, takes_judges
from penstock.workers.rewards.kinds.box import last_box
from penstock.workers.rewards.kinds.kind import Kind
from penstock.workers.rewards.kinds.question import Question
from penstock.workers.rewards.kinds.registry import NAMES, check_packages, is_quick, is_remote, kind_of, needs_jail
from penstock.workers.rewards.outcomes import keyed, number_of, too_long, words
from penstock.workers.rewards.processes import CheckProcesses
from penstock.workers.rewards.remote import RemoteReward
from penstock.workers.rewards.shaping import overlong

if TYPE_CHECKING:
    from penstock.workers.rewards.pool.client import Checks


#: Scores one sample: a number, or a dict with one under ``RewardConfig.key``.
RewardFunction = Callable[[Sample], Awaitable[Any]]

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """The result of one reward for a sample."""

    number: float
    info: dict[str, Any]
    of_steps: steps.Steps | None


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
        self.remote = RemoteReward(config.remote)
        #: Judges for rewards, and for environments of the same worker.
        self.judges = Judges(config.judges, waits=waits)
        self.group = GroupReward(config, self.judges)
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
            steps.keep(sample, found.of_steps)
            sample.reward, sample.reward_info = number, info
        finally:
            sample.reward_s = time.monotonic() - started

    def take(self, sample: Sample) -> None:
        """Validate a reward that a hook or an environment has set, like that of a reward function.

        Raises:
            RewardError: reward_not_a_number, reward_too_large.
        """
        what = "that was set on it"
        number, info = number_of(sample.reward, sample.id, what, self.config.key)
        info = sample.reward_info | info
        steps.keep(sample, steps.take_out(info, sample, what))
        sample.reward, sample.reward_info = number, info

    async def close(self) -> None:
        """End the processes of slow rewards; withdraw open checks from the pool."""
        if self.checks is not None:
            await self.checks.close()
        await self.remote.close()
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
        of_steps: steps.Steps | None = None
        for name, weight in parts.items():
            if (more := found[name].of_steps) is not None:
                of_steps = steps.added(of_steps or {}, more, weight)
        key = self.config.key
        return _Found(*number_of({**about, key: total}, sample.id, "+".join(parts), key), of_steps)

    async def _one(self, sample: Sample, name: str) -> _Found:
        value = await self._try(self._functions[name], sample, name)
        number, info = number_of(value, sample.id, name, self.config.key)
        return _Found(number, info, steps.take_out(info, sample, name))

    def _shaped(self, sample: Sample, number: float, info: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        if self.config.overlong.max_tokens is None or sample.job.lane != Lane.TRAIN:
            return number, info
        lost = overlong(sum(sample.generated), self.config.overlong)
        about = {**info, "overlong": lost, self.config.key: number + lost}
        return number_of(about, sample.id, "with reward.overlong", self.config.key)

    async def _try(self, function: RewardFunction, sample: Sample, name: str) -> Any:
        for attempt in range(1, self.config.max_attempts + 1):
            try:
                # A verifier has its own time limit, from its start; so has a service.
                if not self._is_local(name) or is_remote(name):
                    return await function(sample)
                with calling(CODE, CodeCalled("reward", name, "sample", sample.id)):
                    if name in self._in_process:
                        return await function(sample)
                    return await patiently(lambda: self._call(function, sample, name), self.judges)
            except RewardError:
                raise
            except TimeoutError as exc:
                raise RewardError(JobFailure.REWARD_TIMEOUT, too_long(sample.id, name, self.config.timeout_s)) from exc
            except Exception as exc:
                if attempt == self.config.max_attempts:
                    raise RewardError(
                        JobFailure.REWARD_RAISED, f"sample {sample.id}: reward {name} {words(exc)}"
                    ) from exc
                self._repeats.warn(exc, f"sample {sample.id}: reward {name} raised and is tried again", name)
        raise AssertionError("unreachable")

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
        async def call(sample: Sample) -> Any:
            return await self.remote.ask(sample, (last_box(sample.text) or "") if is_boxed else sample.text)

        return call

    def _slow(self, name: str) -> RewardFunction:
        async def call(sample: Sample) -> Any:
            if self.processes is None:
                check_packages([name])
                self.processes = CheckProcesses(
                    self.config.processes, cpu_s=self.config.check_cpu_s, config=self.config
                )
            found = await self.processes.check(name, Question.of(sample))
            if found.out_of_time:
                return {self.config.key: found.value, "out_of_time": True}
            return keyed(found.value, self.config.key)

        return call
