"""Call a user function, async or not, so that it can neither end the worker nor block it."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from penstock.errors import HookError
from penstock.protocol.records.causes import CodeCalled
from penstock.protocol.records.job import JobFailure
from penstock.system.user_code import Raised, bounded
from penstock.text import format_exc
from penstock.workers.hooks.open_calls import CODE, calling


async def called(work: Callable[[], Any], limit_s: float, call: CodeCalled) -> Any:
    """Return the result of a user function. A plain one is called in a new thread, an async one in this loop.

    Args:
        work: calls it.
        call: the function and the sample or group, named in waits and errors.

    Raises:
        HookError: it raised, tried to exit, or took longer than ``limit_s``; then its thread keeps running.
    """
    what = call.label
    try:
        with calling(CODE, call):
            return await bounded(lambda: _answer(work, what), limit_s, what)
    except TimeoutError as exc:
        raise HookError(
            JobFailure.HOOK_TIMEOUT, f"{what} took longer than {limit_s:g} s; a thread of it still runs."
        ) from exc
    except Raised as exc:
        raise HookError(JobFailure.HOOK_RAISED, f"{what} {exc}.") from exc


async def _answer(work: Callable[[], Any], what: str) -> Any:
    value = await _in_thread(work, what)
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any], what: str) -> Any:
    """Call ``work`` in a new daemon thread: one that hangs cannot be killed, and must block neither pool nor exit.

    An async function returns its coroutine here, which then runs in the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        # The caller may have timed out.
        if not future.done():
            set_(value)

    def run() -> None:
        set_: Callable[[Any], None]
        try:
            value, set_ = work(), future.set_result
        # SystemExit too: it would end the thread without a result.
        except BaseException as exc:
            value, set_ = Raised(f"raised {format_exc(exc)}"), future.set_exception
            value.__cause__ = exc
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_, value)

    threading.Thread(target=run, name=what, daemon=True).start()
    return await future
