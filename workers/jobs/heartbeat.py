"""Renew a worker's leases from a thread of its own, so that a busy event loop loses none.

| where | does |
|---|---|
| the loop, ``run`` | steps every ``STEP_S``, which proves that it is alive; handles lost leases |
| the thread | renews the leases every ``worker.heartbeat_s``, as long as the loop's last step is recent |

A loop without a step for ``worker.stuck_s`` is considered stuck: its leases are left to run out, so that other workers
take its jobs, and the wait is reported (I8) with the line of code that blocks the loop. A process that is stopped or
killed takes the thread with it.
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
#: Longest wait for the thread to end.
END_S = 2.0
#: A job and the token of its lease.
Lease = tuple[str, str]


class Heartbeat:
    """Renew leases until ``run`` is cancelled.

    Args:
        leases: returns the current leases; called in the thread, so it must not change anything.
        lost: called in the loop, after each renewal, with the leases that another worker has.
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
        """Renew until cancelled. Raises what ends the thread."""
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
            # A renewal in flight is harmless; one that hangs must not block the exit.
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
        """Return False while the loop has been stuck for too long; log that once, and report it while it lasts."""
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
                "event loop made no step for %.0f s (worker.stuck_s is %g), so its leases are no longer renewed; "
                "it is at:\n%s",
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
    # A loop that has ended needs no callback.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
