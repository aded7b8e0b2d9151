"""Blocking work of an event loop that may never come back, such as writing to a network file system that is gone."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
#: Called by work whenever something has come back.
Step = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    work: Callable[[Step], T]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[T] = field(init=False)
    begun: bool = False
    ended: bool = False
    #: Nobody waits for it any more.
    left: bool = False
    #: It was given up for its silence.
    silent: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        self.answer = self.loop.create_future()


class DaemonThreads:
    """Does work in a few daemon threads, and goes on without what makes no progress.

    Nobody can end such a thread, and nobody waits for it, not even at the end of the process. While one hangs no other
    work is begun.

    Args:
        name: of the threads.
        most: so many calls are under way at once; others wait their turn.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        #: Calls that were given up for their silence and have not come back.
        self._silent = 0
        #: Of all calls: who waits for a turn waits for as long as there is any.
        self._steps = 0

    async def do(self, work: Callable[[Step], T], silent_s: float) -> T:
        """What ``work`` returns, or raises. It is given what it calls whenever something has come back.

        Raises:
            TimeoutError: for ``silent_s`` nothing came back, and it may still be done; or an earlier call has not come
                back, and this one is not begun.
        """
        if self._silent:
            raise TimeoutError("what was asked before has not come back")
        call = _Call(work, asyncio.get_running_loop())
        self._calls.put(call)
        if len(self._threads) < self._most:
            self._threads.append(threading.Thread(target=self._serve, name=self._name, daemon=True))
            self._threads[-1].start()
        try:
            await self._until_silent(call, silent_s)
            return call.answer.result()
        finally:
            self._leave(call)

    async def _until_silent(self, call: _Call[Any], silent_s: float) -> None:
        while True:
            before = self._progress(call)
            done, _ = await asyncio.wait({call.answer}, timeout=silent_s)
            if done:
                return
            # What has ended is on its way here, however busy the loop is.
            if not call.ended and self._progress(call) == before:
                call.silent = True
                raise TimeoutError(f"nothing came back in {silent_s:g} s")

    def _progress(self, call: _Call[Any]) -> tuple[bool, int]:
        return call.begun, call.steps if call.begun else self._steps

    def _leave(self, call: _Call[Any]) -> None:
        with self._lock:
            call.left = True
            call.silent = call.silent and call.begun and not call.ended
            self._silent += call.silent

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            with self._lock:
                call.begun = not call.left
            if call.begun:
                self._work_on(call)

    def _work_on(self, call: _Call[Any]) -> None:
        def step() -> None:
            call.steps += 1
            self._steps += 1

        returned: Any = None
        raised: BaseException | None = None
        try:
            returned = call.work(step)
        except BaseException as exc:
            raised = exc
        with self._lock:
            call.ended = True
            self._silent -= call.silent
            self._steps += 1
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            call.loop.call_soon_threadsafe(_answer, call, returned, raised)

    def close(self) -> None:
        """End the threads that have nothing to do. Returns at once."""
        for _ in self._threads:
            self._calls.put(None)


def _answer(call: _Call[Any], returned: Any, raised: BaseException | None) -> None:
    if call.left:
        return
    if raised is not None:
        call.answer.set_exception(raised)
    else:
        call.answer.set_result(returned)
