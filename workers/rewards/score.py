"""Rewards of samples behind one async interface; one that fails has a named outcome, never a number (T11).

A reward is built in (built_in.py), ``math_verify``, or ``module:function`` of the user's. A job's own reward goes
before the run's, if the worker's configuration names it: nothing else is imported. With ``reward.pool.kind: rq`` all
but the built-in ones are asked of the verifier pool (pool/client.py).
"""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from penstock.config import RewardConfig
from penstock.config.code_names import REWARDS
from penstock.errors import ConfigError, RewardError
from penstock.protocol.records.job import Job, JobFailure
from penstock.protocol.records.sample import Sample
from penstock.system.extras import check_installed
from penstock.system.user_code import bounded
from penstock.words import said, shown
from workers.jobs.repeats import Repeats
from workers.rewards.allowed import import_reward
from workers.rewards.built_in import BUILT_IN
from workers.rewards.math_verifier import MathVerifier
from workers.rewards.outcomes import Raised, number_of, too_long, words

if TYPE_CHECKING:
    from workers.rewards.pool.client import Checks


#: Scores one sample: a number, or a dict with one under ``RewardConfig.key``.
RewardFunction = Callable[[Sample], Awaitable[Any]]

log = logging.getLogger(__name__)


class Rewards:
    """Scores samples of one worker.

    Args:
        checks: the way to the verifier pool; None: rewards are computed here.
        allowed: rewards that jobs may name beside the run's and the built-in ones, from the worker's own configuration.
            A job travels through Redis, and whoever writes there must not choose what is imported here.

    Raises:
        ConfigError: the run's reward, or one of ``allowed``, is not there, or needs what is not installed.
    """

    def __init__(self, config: RewardConfig, checks: "Checks | None" = None, allowed: Collection[str] = ()) -> None:
        self.config = config
        self.checks = checks
        #: Processes for ``math_verify``; None before the first check.
        self.verifier: MathVerifier | None = None
        self._repeats = Repeats()
        if checks is None and "math_verify" in (config.function, *allowed):
            check_installed("math_verify", "reward math_verify")
        names = dict.fromkeys((config.function, *allowed, *(REWARDS if checks is None else BUILT_IN)))
        self._functions = {name: self._load(name) for name in names}

    async def score(self, sample: Sample) -> None:
        """Set ``reward``, ``reward_info`` and ``reward_s`` of the sample.

        Waits for at most ``timeout_s`` per try; with a verifier pool, beside the wait for a free verifier.

        A bool counts as 1 or 0. A reward that raises is tried ``max_attempts`` times; one that hangs, or gives no
        finite number, is not tried again.

        Raises:
            ConfigError: as :meth:`check`.
            RewardError: ``outcome`` is reward_raised, reward_timeout, reward_not_a_number or reward_too_large; the
                sample is unchanged but for ``reward_s``.
        """
        name = sample.job.reward or self.config.function
        started = time.monotonic()
        self.check(sample.job)
        try:
            value = await self._try(self._functions[name], sample, name)
            sample.reward, sample.reward_info = number_of(value, sample.id, name, self.config.key)
        finally:
            sample.reward_s = time.monotonic() - started

    async def close(self) -> None:
        """End the verifier's processes; checks that the pool still has are withdrawn."""
        if self.checks is not None:
            await self.checks.close()
        if self.verifier is not None:
            await self.verifier.close()
            self.verifier = None

    async def _try(self, function: RewardFunction, sample: Sample, name: str) -> Any:
        for attempt in range(1, self.config.max_attempts + 1):
            try:
                # A verifier's time begins when it does.
                if not self._is_local(name):
                    return await function(sample)
                passes = (RewardError,) if name in REWARDS else ()
                return await bounded(lambda: function(sample), self.config.timeout_s, f"reward {sample.id}", passes)
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

    def _is_local(self, name: str) -> bool:
        return self.checks is None or name in BUILT_IN

    def check(self, job: Job) -> None:
        """Raise ConfigError where a job names a reward that this worker may not run. Imports nothing."""
        if job.reward and job.reward not in self._functions:
            raise ConfigError(
                f"job {job.id} names reward {shown(job.reward)}, and a worker imports only what its own configuration "
                "names: add it to worker.rewards, if it is yours, and start the workers again."
            )

    def _load(self, name: str) -> RewardFunction:
        if name in BUILT_IN:
            return _at_once(BUILT_IN[name])
        if self.checks is not None:
            return self.checks.asking(name)
        if name == "math_verify":
            return self._math_verify
        return _async(import_reward(name), name)

    async def _math_verify(self, sample: Sample) -> dict[str, Any]:
        if self.verifier is None:
            check_installed("math_verify", "reward math_verify")
            self.verifier = MathVerifier(self.config.processes, cpu_s=self.config.check_cpu_s)
        verdict = await self.verifier.verify(sample.job.label, sample.text)
        return {self.config.key: float(verdict.correct), **({"out_of_time": True} if verdict.out_of_time else {})}


def _at_once(function: Callable[[Sample], Any]) -> RewardFunction:
    async def call(sample: Sample) -> Any:
        return function(sample)

    return call


def _async(function: Callable[[Sample], Any], name: str) -> RewardFunction:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return function

    async def call(sample: Sample) -> Any:
        value = await _in_thread(function, sample, name)
        return await value if inspect.isawaitable(value) else value

    return call


async def _in_thread(function: Callable[[Sample], Any], sample: Sample, name: str) -> Any:
    """Call in a thread of its own. One that hangs cannot be killed: it is left behind, and a daemon so that it does
    not hold up the worker's end; a pool's threads would be used up by it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        # The waiter may have given up.
        if not future.done():
            set_(value)

    def work() -> None:
        try:
            value: Any = function(sample)
            set_ = future.set_result
        # SystemExit too: the thread would end, and nobody hear of it.
        except BaseException as exc:
            value, set_ = _raised(exc), future.set_exception
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_, value)

    thread = threading.Thread(target=work, name=f"reward {sample.id}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        log.warning("sample %s: reward %s still runs in its thread, which cannot be killed", sample.id, name)
        raise


def _raised(exc: BaseException) -> Raised:
    raised = Raised(f"raised {said(exc)}")
    raised.__cause__ = exc
    return raised
