"""The reward of a whole group: a function of all its samples, each with its individual reward.

A failure is a named outcome and never a number (T11), as with the reward of a sample.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.config import RewardConfig
from penstock.errors import RewardError
from penstock.hooks.signatures import check_hook, is_async
from penstock.hooks.slime import seen
from penstock.names import Lane
from penstock.records.codec import pack
from penstock.records.job import Job, JobFailure
from penstock.records.sample import Sample
from penstock.records.worker_causes import CodeCalled
from penstock.system.user_code import bounded, find_function
from penstock.text import format_exc, safe_repr
from penstock.workers.hooks.open_calls import CODE, calling
from penstock.workers.hooks.recorded_engine import Repeats
from penstock.workers.rewards.allowed import is_of_slime
from penstock.workers.rewards.calls import NotJudged, awaiting, patiently, tried
from penstock.workers.rewards.judges import Judges
from penstock.workers.rewards.outcomes import MAX_INFO_BYTES, number_of


def ranks(samples: Sequence[Sample]) -> list[float]:
    """Return for each answer the share of the others with a lower individual reward, ties as half: 0 to 1.

    The mean is always 1/2, so scale and shift of a score, of a judge for instance, do not matter. 1/2 for a group of
    one.
    """
    return _beaten([sample.reward or 0.0 for sample in samples])


def shortest_right(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for the shortest correct answer, 1/2 for the longest, linear by rank in between; 0 for wrong ones.

    An answer is correct if its individual reward is above 0; its length is its number of generated tokens. Ties share
    the mean of their ranks.
    """
    right = [k for k, sample in enumerate(samples) if (sample.reward or 0.0) > 0]
    beaten = _beaten([-float(sum(samples[k].generated)) for k in right])
    found = [0.0] * len(samples)
    for k, share in zip(right, beaten, strict=True):
        found[k] = 0.5 + share / 2 if len(right) > 1 else 1.0
    return found


def _beaten(scores: Sequence[float]) -> list[float]:
    """Return for each score the share of the others that are lower, equal ones as half."""
    others = len(scores) - 1
    if others < 1:
        return [0.5] * len(scores)
    lower, below = {}, 0
    for score, many in sorted(Counter(scores).items()):
        lower[score] = below + (many - 1) / 2
        below += many
    return [lower[score] / others for score in scores]


#: Score the samples of a group: a number, or a dict with one under ``RewardConfig.key``, for each in order.
GroupFunction = Callable[[Sequence[Sample]], Awaitable[Any]]

_OWN: dict[str, Callable[[Sequence[Sample]], Sequence[float]]] = {"ranks": ranks, "shortest_right": shortest_right}
#: Entry of ``reward_info``: the individual reward of the sample.
ALONE = "sample_reward"


class GroupReward:
    """``reward.group`` of one worker.

    Args:
        args: first argument of functions with slime's signature; None: empty.

    Raises:
        ConfigError: it does not exist.
    """

    def __init__(self, config: RewardConfig, judges: Judges, args: Namespace | None = None) -> None:
        self._config = config
        self._judges = judges
        self._repeats = Repeats()
        self.name = config.group or ""
        self._function = _load(self.name, judges, args or Namespace()) if self.name else None

    def is_for(self, job: Job) -> bool:
        """Return whether groups of this job get one: those that are trained on."""
        return self._function is not None and job.lane == Lane.TRAIN

    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, dict[str, Any]]]:
        """Return the number and the new ``reward_info`` of each sample; the samples are unchanged.

        Waits for at most ``timeout_s`` per attempt. If the function raises, there are ``max_attempts``; a timeout, or a
        result without one finite number for each, is not retried.

        Raises:
            RewardError: ``outcome`` is reward_raised, reward_timeout, reward_not_a_number or reward_too_large.
        """
        job = samples[0].job.id
        given = await self._try(samples, job)
        values = _values(given, len(samples))
        if values is None:
            raise RewardError(
                JobFailure.REWARD_NOT_A_NUMBER,
                f"group {job}: reward {self.name} gave {safe_repr(given)}, not a list of {len(samples)} numbers, "
                "one for each sample in order.",
            )
        return [self._read(sample, value) for sample, value in zip(samples, values, strict=True)]

    def _read(self, sample: Sample, value: Any) -> tuple[float, dict[str, Any]]:
        number, more_info = number_of(value, sample.id, self.name, self._config.key)
        info = {**sample.reward_info, **more_info, ALONE: sample.reward}
        if (num_bytes := len(pack(info))) > MAX_INFO_BYTES:
            raise RewardError(
                JobFailure.REWARD_TOO_LARGE,
                f"sample {sample.id}: its reward and reward {self.name} of its group gave {num_bytes:,} bytes beside "
                f"their numbers, and a sample's record holds {MAX_INFO_BYTES:,}: keep what is long elsewhere.",
            )
        return number, info

    async def _try(self, samples: Sequence[Sample], job: str) -> Any:
        function, limit_s = self._function, self._config.timeout_s
        assert function is not None

        async def work() -> Any:
            with calling(CODE, CodeCalled("reward", self.name, "group", job)):
                return await patiently(
                    lambda: bounded(lambda: function(samples), limit_s, f"reward {job}", (NotJudged,)), self._judges
                )

        return await tried(work, f"group {job}", self.name, self._config, self._repeats)


def _values(given: Any, count: int) -> list[Any] | None:
    """Return the result of a group reward if it is a list (tuple, array) of ``count`` values; else None.

    A generator is refused: its code would run here, without a time limit.
    """
    try:
        if isinstance(given, (str, bytes, dict, set)) or not hasattr(given, "__len__") or len(given) != count:
            return None
        return list(given)
    # Reading a value of a user's type runs user code.
    except BaseException as exc:
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER,
            f"the result of a group reward, {safe_repr(given)}, cannot be read: {format_exc(exc)}.",
        ) from exc


def _load(name: str, judges: Judges, args: Namespace) -> GroupFunction:
    own = _OWN.get(name)
    if own is None:
        function = find_function(name, "reward.group")
        check_hook("reward.group", name, function)
        if is_of_slime(function):
            function = _of_slime(function, args)
        asked: GroupFunction = awaiting(function, name, lambda samples: f"group {samples[0].job.id}", judges)

        async def ask(samples: Sequence[Sample]) -> Any:
            return await asked([sample.copy_for_user() for sample in samples])

        return ask

    async def call(samples: Sequence[Sample]) -> Sequence[float]:
        return own(samples)

    return call


def _of_slime(function: Callable[..., Any], args: Namespace) -> Callable[[Sequence[Sample]], Any]:
    """Call a function of slime's signature, ``(args, samples)``, with samples of its form."""

    async def asked(samples: Sequence[Sample]) -> Any:
        return await function(args, [seen(sample) for sample in samples])

    return asked if is_async(function) else lambda samples: function(args, [seen(sample) for sample in samples])
