"""Renew a worker's leases in a separate thread, so that a busy event loop does not lose leases.

| where | does |
|---|---|
| event loop, ``run`` | records a step every ``STEP_S`` as a sign of life; handles lost leases |
| thread | renews the leases every ``worker.heartbeat_s`` while the last step is recent |

An event loop without a step for ``worker.stuck_s`` is considered stuck: its leases run out, other workers lease its
jobs, and the wait is reported (I8) with the line of code that blocks the loop. Stopping or killing the process also
ends the thread.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

from penstock.errors import QueueUnavailable
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting
from penstock.records.keys import Keys
from penstock.records.worker_causes import EventLoopStuck
from penstock.redis.control import Control

log = logging.getLogger(__name__)

#: Seconds between two steps of the event loop.
STEP_S = 0.25
#: Longest wait for the thread to exit.
END_S = 2.0
#: A job and the token of its lease.
Lease = tuple[str, str]


class Heartbeat:
    """Renew leases until ``run`` is cancelled.

    Args:
        leases: returns the current leases; called in the thread, so it must not modify state.
        lost: called in the event loop after each renewal with the leases that other workers hold.
        every_s, stuck_s: seconds; see ``WorkerConfig``.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        worker: str,
        *,
        leases: Callable[[], list[Lease]],
        lost: Callable[[set[Lease]], None],
        every_s: float,
        stuck_s: float,
    ) -> None:
        self._keys = keys
        self._worker = worker
        self._leases = leases
        self._lost = lost
        self._every_s = every_s
        self._stuck_s = stuck_s
        self._end = threading.Event()
        self._control = Control(url, stopped=self._end.is_set)
        self._waiting = PublishedWaiting(self._control.client, keys, f"worker:{worker}:loop")
        self._stepped = time.monotonic()
        self._is_stuck = False

    async def run(self) -> None:
        """Renew leases until cancelled. Raises the error that ends the thread."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(target=self._beat, args=(loop, failed), name="heartbeat", daemon=True)
        self._stepped = time.monotonic()
        thread.start()
        try:
            while not failed.done():
                self._stepped = time.monotonic()
                await asyncio.wait({failed}, timeout=STEP_S)
            failed.result()
        finally:
            self._end.set()
            # A renewal in flight is harmless, but a hanging one must not block the exit.
            await asyncio.to_thread(thread.join, END_S)

    def _beat(self, loop: asyncio.AbstractEventLoop, failed: "asyncio.Future[None]") -> None:
        try:
            while not self._end.is_set():
                if self._loop_moves():
                    self._renew(loop)
                self._end.wait(self._every_s)
        except Exception as exc:
            if not (self._end.is_set() and isinstance(exc, QueueUnavailable)):
                _call_in_loop(loop, partial(_fail, failed, exc))
        finally:
            self._waiting.end()
            self._control.close()

    def _loop_moves(self) -> bool:
        """Return False while the event loop is stuck; log once, and report the wait until it recovers."""
        stuck_for_s = time.monotonic() - self._stepped
        if stuck_for_s < self._stuck_s:
            if self._is_stuck:
                log.warning("event loop recovered")
                self._is_stuck = False
                self._waiting.end()
            return True
        line, stack = _main_thread_position()
        if not self._is_stuck:
            self._is_stuck = True
            log.error(
                "event loop blocked for %.0f s (worker.stuck_s is %g); leases are no longer renewed; stack:\n%s",
                stuck_for_s,
                self._stuck_s,
                stack,
            )
        self._waiting.blocked_on(EventLoopStuck(self._stuck_s, line))
        return False

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        leases = self._leases()
        if not leases:
            return
        renew = scripts.renew(self._keys, self._worker, leases)
        gone: list[str] = self._control.call(renew)
        _call_in_loop(loop, lambda: self._lost({lease for lease in leases if lease[0] in gone}))


def _main_thread_position() -> tuple[str, str]:
    """Return the innermost line of the main thread, and its stack as text."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    last = stack[-1] if stack else None
    line = f"{last.filename}:{last.lineno} ({last.name})" if last else "code that cannot be seen"
    return line, "".join(stack.format())


def _fail(future: "asyncio.Future[None]", exc: Exception) -> None:
    if not future.done():
        future.set_exception(exc)


def _call_in_loop(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    # A closed event loop needs no callback.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
