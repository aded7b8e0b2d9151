"""Client of the verifier pool in a worker: checks are enqueued with rq, and verdicts arrive on the worker's own stream.

    ask ─> rq job ─> (queue; waits without a limit, and reports it) ─> started ─> verdict within ``reward.timeout_s``
             │                                                           ├─ late: the verifier must stop it
             │                                                           └─ the verifier is gone: as if it had raised
             └─ rq failed or forgot it: as if it had raised

rq is not trusted with a sample: the worker holds the sample and the job's lease, and a lost check is enqueued again, at
most ``reward.max_attempts`` times in all. An abandoned check is withdrawn, or skipped.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError
from rq import Queue
from rq.command import send_command
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueFull, RewardError
from penstock.protocol.presence import GONE_S
from penstock.protocol.waits import Waiting
from penstock.records.cause import Cause
from penstock.records.codec import name_shown
from penstock.records.job import JobFailure
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.records.worker_causes import ChecksRunning, NoVerifiers, VerifiersBusy
from penstock.redis.commands import AsyncClient, Client
from penstock.redis.connect import as_redis
from penstock.redis.control import AsyncControl, Control
from penstock.text import safe_repr
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.outcomes import too_long
from penstock.workers.rewards.wire import ENTRY, MAX_BYTES, Verdict, sample_to_json

log = logging.getLogger(__name__)

#: Seconds between two checks of the pool while checks are open.
LOOK_S = 1.0
#: Longest blocking read of the stream of verdicts.
BLOCK_S = 2.0
#: rq's statuses of a job that waits or runs.
_OPEN = (b"queued", b"started")
#: Longest wait for withdrawals on close.
CLOSE_S = 5.0
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


class _Check:
    """One open check."""

    def __init__(self) -> None:
        #: rq has it.
        self.is_put = False
        #: Name of its verifier, once it is started.
        self.verifier = ""
        #: Set when it is started, or over.
        self.started = asyncio.Event()
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        #: Why it was missing at the last look; '' if it was not.
        self.missing = ""

    def start(self, verifier: str) -> None:
        self.verifier = verifier
        self.started.set()

    def end(self, result: Verdict | Exception) -> None:
        if not self.verdict.done():
            if isinstance(result, Exception):
                self.verdict.set_exception(result)
            else:
                self.verdict.set_result(result)
        self.started.set()

    def look(self, missing: str) -> None:
        """End it if it was missing twice: its verdict may have been in flight the first time."""
        if self.missing and missing:
            self.end(Verdict(error=f"was not computed: {missing}"))
        self.missing = missing


class Checks:
    """The verifier pool as one worker uses it; ``run`` must be running for ``ask`` to be answered.

    Args:
        asker: the worker's name, never used by another.
        waiting: reports what its checks wait for.
    """

    def __init__(self, config: Config, keys: Keys, asker: str, waiting: Waiting) -> None:
        assert config.redis.url is not None
        self.config = config.reward
        self.keys = keys
        self.asker = asker
        self._waiting = waiting
        self._allowed = allowed_rewards(config)
        self._closed = False
        self._open: dict[str, _Check] = {}
        #: Presence of verifiers by name, and when (monotonic) it last changed.
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._control = AsyncControl(config.redis.url, block_s=BLOCK_S)
        # rq has no asyncio; one thread, so that a withdrawal follows its check.
        self._sync = Control(config.redis.url, stopped=lambda: self._closed)
        self._thread = ThreadPoolExecutor(1, "checks")
        self._queue = Queue(keys.checks, connection=as_redis(self._sync.client), serializer=JSONSerializer)
        self._withdrawals: set[asyncio.Future[None]] = set()

    def asking(self, name: str) -> Callable[[Sample], Awaitable[Any]]:
        """Return reward ``name`` as a function that calls the pool. Raises ConfigError if it is not allowed."""
        if name not in self._allowed:
            raise ConfigError(
                f"the verifier pool does not run {safe_repr(name)}, only "
                f"{', '.join(sorted(self._allowed)) or 'nothing'}: add it to worker.rewards."
            )

        return partial(self.ask, name)

    async def ask(self, name: str, sample: Sample) -> dict[str, Any]:
        """Make one check; return the reward's result, with its number under ``reward.key``.

        Waits for a verifier without a limit, then for at most ``reward.timeout_s``.

        Raises:
            RewardError: reward_timeout, reward_not_a_number, reward_too_large, reward_raised (metadata cannot be JSON).
            Raised: the reward raised, or its verifier died.
        """
        text = sample_to_json(sample, MAX_BYTES)
        check, id_ = _Check(), uuid4().hex
        self._open[id_] = check
        try:
            await self._put(id_, name, text)
            check.is_put = True
            await check.started.wait()
            async with asyncio.timeout(self.config.timeout_s):
                verdict = await check.verdict
        except TimeoutError:
            message = too_long(f"sample {sample.id}", name, self.config.timeout_s)
            raise RewardError(JobFailure.REWARD_TIMEOUT, message) from None
        finally:
            del self._open[id_]
            self._withdraw(id_, check)
        return verdict.result(self.config.key)

    async def _put(self, id_: str, name: str, text: str) -> None:
        """Enqueue a check; waits while Redis is full."""

        def enqueue(client: Client) -> None:
            client.set(self.keys.asker(self.asker), 1, ex=ASKER_TTL_S)
            self._queue.enqueue_call(
                ENTRY,
                args=(self.asker, name, text),
                job_id=id_,
                timeout=int(self.config.timeout_s + SLACK_S) + 1,
                ttl=QUEUED_TTL_S,
                result_ttl=0,
                failure_ttl=FAILURE_TTL_S,
                description=f"{name} for {self.asker}",
            )

        while True:
            try:
                return await self._in_thread(lambda: self._sync.do(enqueue))
            except QueueFull as exc:
                self._waiting.blocked_on(exc.cause)
                await asyncio.sleep(FULL_S)

    def _withdraw(self, id_: str, check: _Check) -> None:
        """Stop a check that has no verdict, or prevent its start. Returns at once: a cancelled caller must not wait."""
        # Cancelling a wait cancels its future.
        if (check.verdict.done() and not check.verdict.cancelled()) or self._closed:
            return
        future = asyncio.ensure_future(self._in_thread(lambda: self._withdraw_now(id_)))
        self._withdrawals.add(future)
        future.add_done_callback(self._withdrawals.discard)

    def _withdraw_now(self, id_: str) -> None:
        client, key = self._sync.client, RqJob.key_for(id_)
        try:
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
        except RedisError as exc:
            # rq's own time limit ends it; its verdict is ignored.
            log.warning("failed to withdraw an abandoned check: %s", exc)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def run(self) -> None:
        """Receive verdicts, and detect lost checks, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="verdicts")
            group.create_task(self._watch(), name="verifiers")

    async def close(self) -> None:
        """Withdraw open checks and close the connections; waits for a few seconds at most."""
        if self._closed:
            return
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=CLOSE_S)
        self._closed = True
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(CLOSE_S):
                mine = (self.keys.asker(self.asker), self.keys.verdicts(self.asker))
                await self._control.do(lambda client: client.unlink(*mine))
        self._waiting.end()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._sync.close()
        await self._control.close()

    async def _listen(self) -> None:
        while True:
            await self._read_stream()

    async def _read_stream(self) -> None:
        """Process the entries of the stream, and delete them.

        Read from the beginning: a stream that expired starts again with smaller ids if Redis' clock was ahead before.
        """
        stream = self.keys.verdicts(self.asker)
        found = await self._control.do(lambda client: client.xread({stream: "0"}, count=256, block=int(BLOCK_S * 1000)))
        if not found:
            return
        entries = found[0][1]
        for _, fields in entries:
            self._handle(fields)
        # Only now: entries lost with a broken connection are read again.
        await self._control.do(lambda client: client.xdel(stream, *(entry for entry, _ in entries)))

    def _handle(self, fields: dict[bytes, bytes]) -> None:
        check, body = self._open.get(name_shown(fields.get(b"id", b""))), fields.get(b"body", b"")
        if check is None:
            return
        if len(body) > 2 * MAX_BYTES:
            check.end(Verdict(error=f"gave a verdict of {len(body)} bytes, more than a check may give"))
            return
        try:
            check.end(Verdict.from_json(body))
        except ProtocolError as exc:
            check.end(exc)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._open:
                await self._check_pool()
            else:
                self._waiting.end()

    async def _check_pool(self) -> None:
        checks = {id_: check for id_, check in self._open.items() if check.is_put}

        async def ask(client: AsyncClient) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                pipe.set(self.keys.asker(self.asker), 1, ex=ASKER_TTL_S)
                pipe.hgetall(self.keys.verifiers)
                for id_ in checks:
                    pipe.hmget(RqJob.key_for(id_), "status", "worker_name")
                return await pipe.execute()

        _, records, *found = await self._control.do(ask)
        present = self._present(records)
        for check, (status, verifier) in zip(checks.values(), found, strict=True):
            missing = "" if status in _OPEN else "rq has lost it"
            if status == b"started" and verifier:
                check.start(name_shown(verifier))
            if check.verifier and check.verifier not in present:
                missing = f"its verifier {check.verifier} is gone"
            check.look(missing)
        self._waiting.blocked_on(self._cause(present))

    def _present(self, records: dict[bytes, bytes]) -> set[str]:
        """Return the verifiers whose presence changed within ``GONE_S``, by this machine's clock."""
        now = time.monotonic()
        seen = {}
        for name, raw in records.items():
            before = self._seen.get(verifier := name_shown(name))
            seen[verifier] = before if before is not None and before[0] == raw else (raw, now)
        self._seen = seen
        return {name for name, (_, changed) in seen.items() if now - changed < GONE_S}

    def _cause(self, present: set[str]) -> Cause | None:
        if queued := sum(not check.started.is_set() for check in self._open.values()):
            return VerifiersBusy(queued, len(present)) if present else NoVerifiers(queued)
        busy = sorted({check.verifier for check in self._open.values() if check.verifier})
        return ChecksRunning(len(self._open), tuple(busy)) if busy else None
