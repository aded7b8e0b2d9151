"""Track open calls of a worker to HTTP services and user code, which are reported as waits.

A caller creates ``OpenCalls`` and enters ``recording`` around its work, which records all nested calls. Without it,
calls are not recorded.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import HookError
from penstock.records.job import JobFailure
from penstock.records.worker_causes import AgentAwaited, CodeCalled, ServiceCalled
from penstock.system.user_code import Raised, bounded, in_thread

Call = AgentAwaited | CodeCalled | ServiceCalled


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Summarize the open calls of one kind."""

    #: Oldest call, number of others, and failure of the last attempt.
    cause: Call
    #: Start of the oldest call (Unix time).
    since_s: float


@dataclass(slots=True)
class Ended:
    """Count finished calls of one function."""

    calls: int = 0
    #: Calls that raised or timed out.
    failures: int = 0
    seconds: float = 0.0


class OpenCalls:
    """Record open calls of one worker by kind. Not thread-safe; methods do not block."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        #: Kind -> serial number -> call and start (Unix time).
        self._open: dict[str, dict[int, tuple[Call, float]]] = {}
        #: Kind -> failure of the last attempt.
        self._failures: dict[str, str] = {}
        #: User code, such as ``step module:Class`` -> counts of its calls.
        self.ended: dict[str, Ended] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls inside the ``with`` and in tasks created there."""
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    @contextmanager
    def of(self, kind: str, call: Call) -> Iterator[None]:
        """Record a call as open inside the ``with``."""
        serial, calls = next(self._serial), self._open.setdefault(kind, {})
        calls[serial] = call, time.time()
        began, failures = time.monotonic(), 0
        try:
            yield
        except Exception:
            failures = 1
            raise
        finally:
            calls.pop(serial, None)
            if isinstance(call, CodeCalled):
                ended = self.ended.setdefault(f"{call.code} {call.function}", Ended())
                ended.calls += 1
                ended.failures += failures
                ended.seconds += time.monotonic() - began

    def fail(self, kind: str, failure: str) -> None:
        """Record the failure of an attempt; '' for a success."""
        self._failures[kind] = failure

    def open(self) -> Mapping[str, OpenCall | None]:
        """Return all kinds called so far with their open calls; None if no call is open."""
        return {kind: self._oldest(kind, calls) for kind, calls in self._open.items()}

    def _oldest(self, kind: str, calls: Mapping[int, tuple[Call, float]]) -> OpenCall | None:
        if not calls:
            return None
        call, since_s = next(iter(calls.values()))
        return OpenCall(replace(call, more=len(calls) - 1, error=self._failures.get(kind, "")), since_s)


#: Kind for calls of user code, and of built-in rewards in child processes.
CODE = "code"

_recorder: ContextVar[OpenCalls | None] = ContextVar("penstock_open_calls", default=None)


@contextmanager
def calling(kind: str, call: Call) -> Iterator[None]:
    """Record a call as open inside the ``with`` if ``OpenCalls.recording`` is active.

    Args:
        kind: group of calls that are counted together, such as a configuration key.
        call: description of the call.
    """
    recorder = _recorder.get()
    if recorder is None:
        yield
        return
    with recorder.of(kind, call):
        yield


def record_failure(kind: str, failure: str) -> None:
    """Record the failure of an attempt of a call of ``kind``; '' for a success."""
    if (recorder := _recorder.get()) is not None:
        recorder.fail(kind, failure)


async def called(work: Callable[[], Any], limit_s: float, call: CodeCalled) -> Any:
    """Call a user function and return its result: plain functions in a new thread, async functions in this loop.

    Args:
        work: calls the function.
        call: description for waits and errors.

    Raises:
        HookError: the function raised, tried to exit, or exceeded ``limit_s``, in which case its thread keeps running.
    """
    what = call.label
    try:
        with calling(CODE, call):
            return await bounded(lambda: in_thread(work, what), limit_s, what)
    except TimeoutError as exc:
        raise HookError(
            JobFailure.HOOK_TIMEOUT, f"{what} timed out after {limit_s:g} s; its thread is still running."
        ) from exc
    except Raised as exc:
        raise HookError(JobFailure.HOOK_RAISED, f"{what} {exc}.") from exc
