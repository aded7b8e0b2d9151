"""Call user functions as coroutines: async ones in the worker's loop, others in a thread of their own.

A function with a parameter ``judges`` gets the frozen models of the configuration.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.errors import ConfigError, JudgeError, RewardError
from penstock.hooks.signatures import is_async
from penstock.text import format_exc
from penstock.workers.rewards.judges import JudgeAway, Judges, takes_judges
from penstock.workers.rewards.outcomes import Raised

T = TypeVar("T")
log = logging.getLogger(__name__)


class NotJudged(RewardError):
    """A judge that a reward called gave no answer.

    Args:
        away: its name if it is unreachable; else ''.
    """

    def __init__(self, outcome: str, message: str, away: str = "") -> None:
        super().__init__(outcome, message)
        self.away = away


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
                away = exc.judge if isinstance(exc, JudgeAway) else ""
                raise NotJudged(exc.outcome, f"{what}: reward {name}: {exc}.", away) from exc

        return ask
    if is_async(function):
        return function

    async def call(given: T) -> Any:
        value = await _in_thread(lambda: function(given), of(given), name)
        return await value if inspect.isawaitable(value) else value

    return call


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


async def _in_thread(call: Callable[[], Any], of: str, name: str) -> Any:
    """Call in a new daemon thread. One that hangs cannot be killed: it is abandoned, and must block neither a pool nor
    the worker's exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        # The caller may have timed out.
        if not future.done():
            set_(value)

    def work() -> None:
        try:
            value: Any = call()
            set_ = future.set_result
        # SystemExit too: it would end the thread without a result.
        except BaseException as exc:
            value, set_ = _raised(exc), future.set_exception
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_, value)

    thread = threading.Thread(target=work, name=f"reward {of}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        log.warning("%s: reward %s still runs in its thread, which cannot be killed", of, name)
        raise


def _raised(exc: BaseException) -> Raised:
    raised = Raised(f"raised {format_exc(exc)}")
    raised.__cause__ = exc
    return raised
