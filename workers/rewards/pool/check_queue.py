"""The queue of checks, which is rq's: a worker adds checks, and withdraws those it no longer waits for."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from redis.exceptions import RedisError
from rq import Queue
from rq.command import send_command
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from penstock.errors import QueueFull
from penstock.protocol.waits import Waiting
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.connect import as_redis
from penstock.redis.control import Control
from penstock.workers.rewards.pool.wire import ENTRY

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Verifiers skip checks of a worker that did not renew its key for this long.
ASKER_TTL_S = 60
#: A check queued for longer is dropped by rq, and then enqueued again.
QUEUED_TTL_S = 24 * 3600
#: rq's own time limit, for checks whose worker is gone: this much longer than ours.
SLACK_S = 5.0
#: How long rq remembers a failed check.
FAILURE_TTL_S = 10
#: Pause before writing to a full Redis is retried.
FULL_S = 1.0


class CheckQueue:
    """The queue as one worker uses it.

    Args:
        asker: the worker's name.
        timeout_s: time limit of a check, once a verifier has started it.
        waiting: reports that Redis is full.
    """

    def __init__(self, url: str, keys: Keys, asker: str, timeout_s: float, waiting: Waiting) -> None:
        self._keys, self._asker, self._timeout_s, self._waiting = keys, asker, timeout_s, waiting
        self._stopped = False
        # rq has no asyncio; one thread, so that a withdrawal follows its check.
        self._control = Control(url, stopped=lambda: self._stopped)
        self._thread = ThreadPoolExecutor(1, "checks")
        self._queue = Queue(keys.checks, connection=as_redis(self._control.client), serializer=JSONSerializer)
        self._withdrawals: set[asyncio.Future[None]] = set()

    @property
    def key(self) -> str:
        """Redis key of the list of checks that no verifier has taken."""
        return str(self._queue.key)

    async def put(self, id_: str, name: str, text: str) -> None:
        """Enqueue a check of a sample by reward ``name``; waits while Redis is full."""

        def enqueue(client: Client) -> None:
            client.set(self._keys.asker(self._asker), 1, ex=ASKER_TTL_S)
            self._queue.enqueue_call(
                ENTRY,
                args=(self._asker, name, text),
                job_id=id_,
                timeout=int(self._timeout_s + SLACK_S) + 1,
                ttl=QUEUED_TTL_S,
                result_ttl=0,
                failure_ttl=FAILURE_TTL_S,
                description=f"{name} for {self._asker}",
            )

        while True:
            try:
                await self._in_thread(lambda: self._control.do(enqueue))
                return
            except QueueFull as exc:
                self._waiting.blocked_on(exc.cause)
                await asyncio.sleep(FULL_S)

    def withdraw(self, id_: str) -> None:
        """Stop a check, or prevent its start. Returns at once: a cancelled caller must not wait."""

        def withdraw() -> None:
            try:
                self._withdraw_now(id_)
            except RedisError as exc:
                # rq's own time limit ends it; its verdict is ignored.
                log.warning("failed to withdraw an abandoned check: %s", exc)

        future = asyncio.ensure_future(self._in_thread(withdraw))
        self._withdrawals.add(future)
        future.add_done_callback(self._withdrawals.discard)

    def _withdraw_now(self, id_: str) -> None:
        client = self._control.client
        key = RqJob.key_for(id_)
        # Atomic: a verifier records its name before it checks whether the job still has data.
        with client.pipeline() as pipe:
            pipe.hget(key, "worker_name")
            pipe.hdel(key, "data")
            verifier, _ = pipe.execute()
        if verifier:
            send_command(as_redis(client), verifier.decode(), "stop-job", job_id=id_)
            return
        with client.pipeline() as pipe:
            pipe.lrem(self._queue.key, 1, id_)
            pipe.delete(key)
            pipe.execute()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def settle(self, timeout_s: float) -> None:
        """Wait for withdrawals, at most this long; then stop retrying a Redis that does not respond."""
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=timeout_s)
        self._stopped = True

    def close(self) -> None:
        """Stop the thread and close the connection."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._control.close()
