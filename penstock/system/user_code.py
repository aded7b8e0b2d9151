"""The user's code inside our processes: how it is imported, and prevented from ending the process.

All its failures become an exception of the one call: otherwise a ``sys.exit`` in a coroutine would end the event loop,
one in a thread would be lost, and an ``os._exit`` would silently end every sample of the worker. The same holds for
tasks and callbacks that it leaves on our loop, and forks that return from it.
"""

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.text import format_exc, utf8_safe

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Longest wait, at the end of a loop, for cancelled tasks.
CLOSE_S = 5.0


class Raised(Exception):
    """The user's code raised, or its process died. The text continues a sentence after the name of that code."""


def has_parameter(code: Callable[..., Any], name: str) -> bool:
    """Return whether a function, or the constructor of a class, has a parameter of this name."""
    try:
        return name in inspect.signature(code).parameters
    # Some functions written in C have no signature.
    except (TypeError, ValueError):
        return False


def find(name: str, what: str) -> Any:
    """Import and return ``module:attribute`` of the user.

    Args:
        what: the configuration key, at the beginning of the error.

    Raises:
        ConfigError: it does not exist, or importing it raised or tried to exit.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{what} {name!r} is not an import path: write it as module:name.")
    try:
        with staying_alive():
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
    except ModuleNotFoundError as exc:
        missing = exc.name or module
        # Either the user's own module, or a package that it imports.
        is_own = module == missing or module.startswith(f"{missing}.")
        remedy = (
            "put it beside where you start penstock, or on PYTHONPATH"
            if is_own
            else f"{module} imports it: install it in penstock's environment (pip install {missing.partition('.')[0]})"
        )
        raise ConfigError(f"{what} {name} cannot be imported: there is no module {missing}; {remedy}.") from exc
    except AttributeError as exc:
        raise ConfigError(
            f"{what} {name} cannot be imported: {utf8_safe(str(exc))}; correct the name after the colon."
        ) from exc
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise ConfigError(f"{what} {name} cannot be imported: importing {module} raised {format_exc(exc)}.") from exc
    return found


def find_function(name: str, what: str) -> Callable[..., Any]:
    """Import and return the function ``module:attribute``; raise ConfigError as ``find``, or if it is not callable."""
    found = find(name, what)
    if not callable(found):
        raise ConfigError(f"{what} {name} is not a function.")
    function: Callable[..., Any] = found
    return function


async def in_thread(work: Callable[[], Any], what: str) -> Any:
    """Return the result of ``work``, called in a new daemon thread; the coroutine of an async function is awaited here.

    A call that hangs cannot be killed: it is abandoned, and must block neither a pool nor the end of the process.

    Raises:
        Raised: it raised anything, including ``sys.exit``.
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
    try:
        value = await future
    except asyncio.CancelledError:
        log.warning("%s still runs in its thread, which cannot be killed", what)
        raise
    return await value if inspect.isawaitable(value) else value


async def bounded(
    work: Callable[[], Awaitable[T]], limit_s: float, name: str, passes: tuple[type[Exception], ...] = ()
) -> T:
    """Return the result of ``work``. Waits for at most ``limit_s``, even if it ignores a cancellation.

    Args:
        passes: our own errors, which are raised unchanged.

    Raises:
        TimeoutError: it took longer; it is cancelled and abandoned.
        Raised: it raised anything, including ``sys.exit`` or a cancellation of its own.
    """
    task = asyncio.create_task(guarded(work, passes), name=name)
    task.add_done_callback(_retrieve_exception)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            # The end of the loop must not wait for a task that ignores this either.
            asyncio.tasks._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]
    if not task.done():
        raise TimeoutError
    return task.result()


async def guarded(work: Callable[[], Awaitable[T]], passes: tuple[type[Exception], ...] = ()) -> T:
    """Return the result of ``work``, as a task of its own; raises as ``bounded``."""
    task, pid = asyncio.current_task(), os.getpid()
    try:
        return await work()
    except GeneratorExit as exc:
        # Raised by the code itself, or is the coroutine closed because it was abandoned?
        if _current_task() is not task:
            raise
        raise Raised(f"raised {format_exc(exc)}") from exc
    except asyncio.CancelledError as exc:
        if task is not None and task.cancelling():
            raise
        raise Raised("was cancelled by its own code") from exc
    except BaseException as exc:
        if isinstance(exc, (Raised, *passes)):
            raise
        raise Raised(f"raised {format_exc(exc)}") from exc
    finally:
        _end_if_forked(pid)


def _current_task() -> "asyncio.Task[Any] | None":
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Retrieve the exception of an abandoned task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def run_through(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> T:
    """Run ``main`` like ``asyncio.run``, but end the loop only after it, and without long delays then.

    A ``sys.exit`` or KeyboardInterrupt in a task or a callback that the user's code left behind, and a ``stop`` of the
    loop, are logged.
    """
    loop = loop_factory()
    asyncio.set_event_loop(loop)
    try:
        return _until_done(loop, loop.create_task(main))
    finally:
        try:
            _end_tasks(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _until_done(loop: asyncio.AbstractEventLoop, task: "asyncio.Future[T]") -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        # RuntimeError: the loop was stopped.
        except (SystemExit, KeyboardInterrupt, RuntimeError) as exc:
            if task.done() or loop.is_closed():
                raise
            log.warning(
                "code left running by a user's call tried to end this process, which continues: %s", format_exc(exc)
            )


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel running tasks, and abandon those that do not end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
        task.add_done_callback(_retrieve_exception)
    if tasks:
        _until_done(loop, loop.create_task(asyncio.wait(tasks, timeout=CLOSE_S)))
    for task in tasks:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
    _until_done(loop, loop.create_task(loop.shutdown_asyncgens()))


def _end_if_forked(pid: int) -> None:
    """End this process if it is a fork that returned from the user's code: it has our connections, but no threads."""
    if os.getpid() != pid:
        how = f" by {format_exc(exc)}" if (exc := sys.exc_info()[1]) is not None else ""
        with contextlib.suppress(OSError):
            os.write(2, f"a process that a user's code forked came back from it{how}, and is ended\n".encode())
        _really_exit(1)


_really_exit = os._exit
_lock = threading.Lock()
_kept_pid = 0
_num_kept = 0


def _refuse_exit(status: int) -> None:
    # Forks end as they must.
    if os.getpid() != _kept_pid:
        _really_exit(status)
    raise SystemExit(f"os._exit({status})")


@contextmanager
def staying_alive() -> Iterator[None]:
    """Make ``os._exit`` of Python code in this process raise SystemExit. May be entered by several threads.

    A fork that was made inside does not leave the block.
    """
    global _kept_pid, _num_kept
    pid = os.getpid()
    with _lock:
        _num_kept = _num_kept + 1 if _kept_pid == os.getpid() else 1
        _kept_pid, os._exit = os.getpid(), _refuse_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        _end_if_forked(pid)
        with _lock:
            _num_kept -= 1
            if not _num_kept:
                os._exit = _really_exit
