"""Call user functions as coroutines: async ones in the worker's loop, others in a thread of their own.

A function with a parameter ``judges`` gets the frozen models of the configuration.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.config import RewardConfig
from penstock.errors import ConfigError, JudgeError, RewardError
from penstock.hooks.signatures import is_async
from penstock.records.job import JobFailure
from penstock.system.user_code import in_thread
from penstock.workers.hooks.recorded_engine import Repeats
from penstock.workers.rewards.judges import Judges, takes_judges
from penstock.workers.rewards.outcomes import too_long, words

T = TypeVar("T")


class NotJudged(RewardError):
    """A judge that a reward called gave no answer."""

    #: Its name if it is unreachable.
    away = ""


def awaiting(
    function: Callable[..., Any], name: str, of: Callable[[T], str], judges: Judges
) -> Callable[[T], Awaitable[Any]]:
    """Return ``function`` as an async one; it raises NotJudged if a judge it calls gives no answer.

    Args:
        name: its name in the configuration.
        of: describes the argument, in a word or two.

    Raises:
        ConfigError: it has a parameter ``judges``, and is not async.
    """
    if takes_judges(function):
        if not is_async(function):
            raise ConfigError(f"reward {name} has a parameter judges, which are asked with await: make it async.")

        async def ask(given: T) -> Any:
            what = of(given)  # the function may change its argument
            try:
                return await function(given, judges=judges)
            except JudgeError as exc:
                error = NotJudged(exc.outcome, f"{what}: reward {name}: {exc}.")
                error.away = exc.away
                raise error from exc

        return ask
    if is_async(function):
        return function

    return lambda given: in_thread(lambda: function(given), f"{of(given)}: reward {name}")


async def patiently(work: Callable[[], Awaitable[T]], judges: Judges) -> T:
    """Return the result of ``work``. If judges are waited for, repeat it whenever it fails with an unreachable judge.

    Raises:
        NotJudged, TimeoutError: as ``work``, unless a judge is unreachable and waited for.
    """
    while True:
        try:
            return await work()
        except NotJudged as exc:
            if not (judges.waits and exc.away):
                raise
            await judges[exc.away].wait_if_away()
        except TimeoutError:
            # The time may have passed at a judge that accepts requests and does not answer.
            if not (judges.waits and await judges.wait_if_away()):
                raise


async def tried(
    work: Callable[[], Awaitable[Any]], what: str, name: str, config: RewardConfig, repeats: Repeats
) -> Any:
    """Return the result of reward ``name``. One that raises has ``max_attempts``; a timeout is not retried.

    Args:
        work: makes one attempt.
        what: the sample or group, for errors.

    Raises:
        RewardError: as ``work``, or ``outcome`` is reward_raised or reward_timeout.
    """
    for attempt in range(1, config.max_attempts + 1):
        try:
            return await work()
        except RewardError:
            raise
        except TimeoutError as exc:
            raise RewardError(JobFailure.REWARD_TIMEOUT, too_long(what, name, config.timeout_s)) from exc
        except Exception as exc:
            if attempt == config.max_attempts:
                raise RewardError(JobFailure.REWARD_RAISED, f"{what}: reward {name} {words(exc)}") from exc
            repeats.warn(exc, f"{what}: reward {name} raised and is tried again", name)
    raise AssertionError("unreachable")
