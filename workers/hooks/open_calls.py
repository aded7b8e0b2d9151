"""Calls of a worker that have not returned yet: to HTTP services and user code. They are reported as waits.

Code that works for others creates ``OpenCalls`` and enters ``hears`` around that work; calls inside, however deep, are
recorded in it. Without it, nothing is recorded.
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
    """The open calls of one kind."""

    #: The oldest call, how many more there are, and how the last attempt failed.
    cause: Call
    #: When the oldest call began (Unix time).
    since_s: float


@dataclass(slots=True)
class Ended:
    """Calls of one function that have ended."""

    calls: int = 0
    #: Those that raised or timed out.
    failures: int = 0
    seconds: float = 0.0


class OpenCalls:
    """Open calls of one worker, by kind. Belongs to one event loop; none of its methods blocks."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        #: Kind -> serial number -> what was called, and when (Unix time).
        self._open: dict[str, dict[int, tuple[Call, float]]] = {}
        #: Kind -> how its last attempt failed.
        self._troubles: dict[str, str] = {}
        #: User code, such as ``step module:Class`` -> its calls.
        self.ended: dict[str, Ended] = {}

    @contextmanager
    def hears(self) -> Iterator[None]:
        """Record calls made inside the ``with``, and in tasks created there."""
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

    def fail(self, kind: str, trouble: str) -> None:
        """Record that an attempt of a call failed; '': one succeeded."""
        self._troubles[kind] = trouble

    def open(self) -> Mapping[str, OpenCall | None]:
        """Return every kind ever called; None if none of its calls is open."""
        return {kind: self._oldest(kind, calls) for kind, calls in self._open.items()}

    def _oldest(self, kind: str, calls: Mapping[int, tuple[Call, float]]) -> OpenCall | None:
        if not calls:
            return None
        call, since_s = next(iter(calls.values()))
        return OpenCall(replace(call, more=len(calls) - 1, error=self._troubles.get(kind, "")), since_s)


#: Kind of calls of user code, and of our own rewards in their processes.
CODE = "code"

_recorder: ContextVar[OpenCalls | None] = ContextVar("penstock_open_calls", default=None)


@contextmanager
def calling(kind: str, call: Call) -> Iterator[None]:
    """Record a call as open inside the ``with``, if ``OpenCalls.hears`` is active.

    Args:
        kind: calls that are counted together, of few kinds: a key of the configuration, say.
        call: what is called.
    """
    recorder = _recorder.get()
    if recorder is None:
        yield
        return
    with recorder.of(kind, call):
        yield


def note_trouble(kind: str, trouble: str) -> None:
    """Record that an attempt of such a call failed, and how; '': one succeeded."""
    if (recorder := _recorder.get()) is not None:
        recorder.fail(kind, trouble)


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
            return await bounded(lambda: in_thread(work, what), limit_s, what)
    except TimeoutError as exc:
        raise HookError(
            JobFailure.HOOK_TIMEOUT, f"{what} took longer than {limit_s:g} s; a thread of it still runs."
        ) from exc
    except Raised as exc:
        raise HookError(JobFailure.HOOK_RAISED, f"{what} {exc}.") from exc
