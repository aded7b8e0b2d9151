"""Connections that survive a restart of Redis: every verb is sent until it is answered, and waits are reported.

Verbs may be sent twice (penstock/protocol/scripts), so a lost connection is only a reason to wait and retry. Waits are
logged; after ``patience_s`` they end with QueueUnavailable.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError

from penstock.errors import PenstockError, QueueRefused, QueueUnavailable
from penstock.redis import connect
from penstock.redis.call import Call, run, run_async
from penstock.redis.commands import AsyncClient, Client
from penstock.redis.refusals import DiskRefused, KeysLost, passing
from penstock.system.stop import pause_s

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Passing errors: a server restarts, loads, was demoted, waits for room on its disk, or lost keys.
PASSING = (redis.ConnectionError, redis.TimeoutError, BusyLoadingError, ReadOnlyError, DiskRefused, KeysLost)
FIRST_WAIT_S, LONGEST_WAIT_S, SAY_EVERY_S = 0.02, 1.0, 10.0


class _Patience:
    """The retry policy: how long to wait before the next attempt, and when to fail."""

    def __init__(self, url: str, patience_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.url = url
        self.patience_s = patience_s
        self.stopped = stopped
        self.began = self.said = 0.0
        self.failures = 0

    def next_wait(self, exc: Exception) -> float:
        now = time.monotonic()
        if not self.began:
            self.began = now
        why = exc if isinstance(exc, QueueUnavailable) else connect.translate(exc, self.url)
        if self.stopped() or now - self.began >= self.patience_s:
            raise why from exc.__cause__ if why is exc else exc
        if now - self.said >= SAY_EVERY_S:
            self.said = now
            log.warning("waiting for Redis for %.0f s: %s", now - self.began, why)
        self.failures += 1
        return pause_s(self.failures, FIRST_WAIT_S, LONGEST_WAIT_S)


class Control:
    """The control Redis for threads that may block.

    Args:
        url: address of the server; it is verified at once, unless ``check`` is False.
        patience_s: longest wait for a server that is gone, also the first time; infinite by default.
        stopped: called before every further attempt; true ends the wait with QueueUnavailable.

    Raises:
        QueueUnavailable: it does not answer within ``patience_s``.
        QueueRefused, ConfigError: it answers, but is not usable; see ``connect``.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = float("inf"),
        stopped: Callable[[], bool] = lambda: False,
        check: bool = True,
    ) -> None:
        self.url = url
        self.patience_s = patience_s
        self.stopped = stopped
        self.client = connect.connect(url, check=False)
        if check:
            self._ask()

    def _ask(self) -> None:
        """Verify the server; wait for one that does not answer."""
        patience = _Patience(self.url, self.patience_s, self.stopped)
        try:
            while True:
                try:
                    return connect.ask(self.client, self.url)
                except QueueRefused:
                    raise
                except QueueUnavailable as exc:
                    time.sleep(patience.next_wait(exc))
        except PenstockError:
            self.client.close()
            raise

    def call(self, call: Call[T]) -> T:
        """Send a verb until it is answered. Blocks."""
        return self.do(lambda client: run(client, call))

    def do(self, work: Callable[[Client], T]) -> T:
        """Repeat idempotent ``work`` until Redis answers it. Blocks. Raises QueueFull."""
        return until_answered(lambda: work(self.client), self.url, patience_s=self.patience_s, stopped=self.stopped)

    def close(self) -> None:
        self.client.close()


def until_answered(
    work: Callable[[], T],
    url: str,
    *,
    patience_s: float = float("inf"),
    stopped: Callable[[], bool] = lambda: False,
) -> T:
    """Repeat idempotent ``work`` until the server at ``url`` answers. Blocks; arguments and errors as ``Control``."""
    patience = _Patience(url, patience_s, stopped)
    while True:
        try:
            return work()
        except OutOfMemoryError as exc:
            raise connect.translate(exc, url) from exc
        except PASSING as exc:
            time.sleep(patience.next_wait(exc))


def _times_cancelled() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _end_if_cancelled(before: int) -> None:
    """Raise CancelledError if a cancellation requested since ``before`` was lost.

    redis-py sends through ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes in the
    moment in which the send ends: the task would run for ever.
    """
    if _times_cancelled() > before:
        raise asyncio.CancelledError


class AsyncControl:
    """The control Redis for asyncio; ``await open()`` checks the server."""

    def __init__(self, url: str, *, patience_s: float = float("inf"), block_s: float = 0.0) -> None:
        self.url = url
        self.patience_s = patience_s
        self.client = connect.connect_async(url, block_s=block_s)
        #: Number of lost connections; holders of leases then look for answers that were lost with a connection.
        self.losses = 0

    async def open(self) -> "AsyncControl":
        await connect.check_async(self.client, self.url)
        return self

    async def call(self, call: Call[T]) -> T:
        """Send a verb until it is answered."""
        return await self.do(lambda client: run_async(client, call))

    async def do(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Repeat idempotent ``work`` until Redis answers it."""
        return await until_answered_async(
            lambda: work(self.client), self.url, patience_s=self.patience_s, on_loss=self._count_loss
        )

    def _count_loss(self) -> None:
        self.losses += 1

    async def close(self) -> None:
        await connect.close_async(self.client)


async def until_answered_async(
    work: Callable[[], Awaitable[T]], url: str, *, patience_s: float, on_loss: Callable[[], None] = lambda: None
) -> T:
    """Repeat idempotent ``work`` until the server at ``url`` answers it; ``on_loss`` is called for each failure."""
    patience = _Patience(url, patience_s)
    asked = _times_cancelled()
    while True:
        try:
            done = await work()
        except PASSING as exc:
            on_loss()
            _end_if_cancelled(asked)
            await asyncio.sleep(patience.next_wait(exc))
        else:
            _end_if_cancelled(asked)
            return done


def raise_passing(answers: list[Any]) -> list[Any]:
    """Return the answers of a pipeline. Raise the error of a server that loads or takes no writes."""
    for answer in answers:
        if isinstance(answer, PASSING):
            raise answer
        if (refusal := passing(answer)) is not None:
            raise refusal
    return answers
