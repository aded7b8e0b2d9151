"""Find the worker with the lease of an episode's job, and send requests to it until it answers.

If a worker is lost, another worker leases its job; meanwhile requests wait, and are then sent to the new worker.
"""

import asyncio
import logging
import random
import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from penstock.config import Config
from penstock.errors import QueueUnavailable
from penstock.protocol.episode_key import MAX_KEY, EpisodeKey
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState, parse_workers
from penstock.protocol.waits import waits_in
from penstock.records.job import JobState
from penstock.records.keys import Keys
from penstock.redis.control import AsyncControl
from penstock.system.stop import pause_s
from penstock.text import format_exc, safe_repr
from penstock.weights.serving import client_context
from penstock.workers.agents.gateway.metrics import Tally
from penstock.workers.agents.gateway.turns import ApiError, invalid

log = logging.getLogger(__name__)

#: Longest wait for Redis before a client gets an error, in seconds.
REDIS_S = 10.0
#: Longest wait for a connection to a worker, and for its answer to ``/open``, in seconds.
CONNECT_S, OPEN_S = 10.0, 10.0
#: First and longest pause before searching for a worker again, in seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
#: Seconds between checks that a worker with a request still has the lease.
CHECK_S = 2.0
#: Seconds between reads of the workers' presence, and between searches for an episode.
PRESENCE_S, ROUND_S = 0.5, 0.25
#: Largest answer of a worker, in bytes.
ANSWER_BYTES = 64 * 1024 * 1024
#: Seconds after which a client without an episode may retry.
RETRY_S = 2
#: Seconds for which an episode is kept whose client disconnected before it received the key.
UNCLAIMED_S = 30.0

#: Valid worker addresses: clients of Redis must not make a gateway send the run's token elsewhere.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
#: Worker statuses that are passed on to the client unchanged.
_FORWARDED = (400, 409, 410, 413)


class WorkerLost(Exception):
    """Report that a worker did not answer, or that another worker must answer.

    Args:
        worked_s: seconds for which the worker had the request.
    """

    def __init__(self, message: str, worked_s: float = 0.0) -> None:
        super().__init__(message)
        self.worked_s = worked_s


@dataclass(frozen=True, slots=True)
class Holder:
    """Describe the state of an episode's job."""

    #: A ``JobState``; '' if the job does not exist.
    state: str
    #: Worker with the lease; '' without a lease.
    worker: str
    #: Whether the episode's sample is committed.
    is_committed: bool


class Routing:
    """Send requests of one gateway to the workers of its run.

    Args:
        token: token of the run.
    """

    def __init__(self, config: Config, token: str, tally: Tally) -> None:
        assert config.redis.url is not None
        self._keys = Keys(config.run)
        self._control = AsyncControl(config.redis.url, patience_s=REDIS_S)
        self._idle_s = config.agents.idle_s
        self._tally = tally
        connector = aiohttp.TCPConnector(limit=0, ssl=client_context(config.agents) or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self._workers: dict[str, WorkerPresence] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._next_round = 0.0
        #: (time, episode) whose client disconnected before it received the key.
        self._unclaimed: list[tuple[float, dict[str, Any]]] = []

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._control.close()

    async def open_episode(self, wait_s: float) -> dict[str, Any]:
        """Open an episode without an agent; wait up to ``wait_s`` for one.

        Raises:
            ApiError: no worker has an episode to open.
            QueueUnavailable: Redis does not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            # One search at a time: after a failed search, others need not repeat it.
            async with self._opening:
                if (found := await self._next_episode()) is not None:
                    return found
            if loop.time() >= deadline:
                raise ApiError(429, await self._why_no_episode(), retry_after_s=RETRY_S)
            await asyncio.sleep(ROUND_S)

    async def call(self, path: str, key: EpisodeKey, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker with the lease of the episode's job; wait while no worker has it.

        A request that was lost with its worker is repeated with ``is_retry``.

        Raises:
            ApiError: the episode ended, the worker refused the request, or no worker leased the job within
            ``agents.idle_s``.
        """
        loop = asyncio.get_running_loop()
        deadline, failures = loop.time() + self._idle_s, 0
        while True:
            try:
                return await self._call_holder(path, key, body)
            except QueueUnavailable as exc:
                why = str(exc)
            except WorkerLost as exc:
                why, deadline = str(exc), deadline + exc.worked_s
            if loop.time() >= deadline:
                raise ApiError(
                    503,
                    f"no worker continued the episode within agents.idle_s = {self._idle_s:g} s: {why}",
                    retry_after_s=RETRY_S,
                )
            failures += 1
            await asyncio.sleep(pause_s(failures, FIRST_PAUSE_S, MAX_PAUSE_S))

    async def is_committed(self, key: EpisodeKey) -> bool:
        """Return whether the episode's sample is committed."""
        return (await self._holder(key)).is_committed

    async def _call_holder(self, path: str, key: EpisodeKey, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker with the lease; raise WorkerLost if the request has to be repeated."""
        holder = await self._holder(key)
        _check_runs(holder, key)
        worker = (await self._live_workers()).get(holder.worker)
        if worker is None or not worker.agents_url:
            raise WorkerLost(f"job {key.job} is {holder.state} and has no worker")
        request, began = asyncio.create_task(self._post(worker, path, body)), time.monotonic()
        try:
            while not (await asyncio.wait({request}, timeout=CHECK_S))[0]:
                if not await self._has_lease(worker, key):
                    raise WorkerLost(f"worker {worker.name} has lost job {key.job}")
            return request.result()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise WorkerLost(f"worker {worker.name} cannot be reached ({format_exc(exc)})") from exc
        except (WorkerLost, aiohttp.ClientError, OSError) as exc:  # TimeoutError is an OSError
            self._tally.repeats += 1
            if "is_retry" in body:
                body["is_retry"] = True
            why = (
                str(exc) if isinstance(exc, WorkerLost) else f"worker {worker.name} does not answer ({format_exc(exc)})"
            )
            raise WorkerLost(why, time.monotonic() - began) from exc
        finally:
            request.cancel()

    async def _has_lease(self, worker: WorkerPresence, key: EpisodeKey) -> bool:
        try:
            held_by = (await self._holder(key)).worker
            return held_by == worker.name and worker.name in await self._live_workers()
        except QueueUnavailable:
            return True  # the worker itself checks its lease

    async def _holder(self, key: EpisodeKey) -> Holder:
        fields = ["st", "own", f"s:{key.k}"]
        state, owner, token = await self._control.do(lambda client: client.hmget(self._keys.group(key.job), fields))
        return Holder(_text(state), _text(owner), token is not None)

    async def _live_workers(self) -> dict[str, WorkerPresence]:
        """Return live workers by name; read at most every ``PRESENCE_S``."""
        loop = asyncio.get_running_loop()
        async with self._reading:
            if loop.time() - self._read_at >= PRESENCE_S:
                records = await self._control.do(lambda client: client.hgetall(self._keys.workers))
                self._workers = {one.name: one for one in parse_workers(records) if one.age_s <= FRESH_S}
                self._read_at = loop.time()
        return self._workers

    async def _next_episode(self) -> dict[str, Any] | None:
        """Search the workers for an episode, unless the last search has just found none."""
        loop = asyncio.get_running_loop()
        while self._unclaimed:
            kept_at, episode = self._unclaimed.pop()
            if loop.time() - kept_at <= min(UNCLAIMED_S, self._idle_s / 2):
                return episode
        if loop.time() < self._next_round:
            return None
        search = asyncio.create_task(self._search_workers())
        try:
            found = await asyncio.shield(search)
        except asyncio.CancelledError:
            # The client disconnected: keep the episode for the next client.
            search.add_done_callback(self._keep)
            raise
        if found is None:
            self._next_round = loop.time() + ROUND_S
        return found

    def _keep(self, search: "asyncio.Task[dict[str, Any] | None]") -> None:
        if not search.cancelled() and search.exception() is None and (found := search.result()) is not None:
            self._unclaimed.append((asyncio.get_running_loop().time(), found))

    async def _search_workers(self) -> dict[str, Any] | None:
        workers = [one for one in (await self._live_workers()).values() if one.agents_url]
        random.shuffle(workers)
        # Include draining workers, last: they can complete their jobs only if the episodes are opened.
        for worker in sorted(workers, key=lambda one: one.state == WorkerState.DRAINING):
            try:
                async with asyncio.timeout(OPEN_S):
                    answer = await self._post(worker, "/open", {})
            except (WorkerLost, ApiError, aiohttp.ClientError, OSError) as exc:
                log.warning("worker %s failed to open an episode: %s", worker.name, format_exc(exc))
                continue
            if answer:
                if not isinstance(key := answer.get("key"), str) or len(key) > MAX_KEY:
                    log.warning("worker %s returned an episode without a key", worker.name)
                    continue
                return answer
        return None

    async def _why_no_episode(self) -> str:
        if not any(one.agents_url for one in (await self._live_workers()).values()):
            return (
                "no worker for agent episodes is ready: start one with a dataset whose environment is agent, or run "
                "`penstock why`"
            )
        records = await self._control.do(lambda client: client.hgetall(self._keys.waits))
        producer = next((one for one in waits_in(records, ()) if one.who == "producer"), None)
        if producer is None:
            return "every leased episode has an agent: retry when more jobs are leased"
        return f"every leased episode has an agent, and the producer waits for {producer.cause}"

    async def _post(self, worker: WorkerPresence, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request to a worker; return the answer, {} if it is empty.

        Raises:
            WorkerLost: another worker must answer, or the same worker later.
            ApiError: the worker refused the request.
            aiohttp.ClientError, OSError: the worker did not answer.
        """
        if not _URL.fullmatch(worker.agents_url):
            raise WorkerLost(f"worker {worker.name} has an invalid gateway address: {safe_repr(worker.agents_url)}")
        try:
            data = orjson.dumps(body)
        except TypeError as exc:  # parsed from JSON, so only too deep nesting can fail
            raise invalid("the request is nested too deeply") from exc
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            worker.agents_url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            answer = _parsed(await _read(response))
            if response.status in (200, 204):
                return answer
            why = answer.get("error")
            return _refused(worker.name, response.status, why if isinstance(why, str) else "no reason given")


def _refused(worker: str, status: int, why: str) -> dict[str, Any]:
    """Raise the error for a worker's HTTP status."""
    if status in (404, 503):
        raise WorkerLost(why)
    if status in _FORWARDED:
        raise ApiError(status, why, is_final=status == 409)
    if status == 401:
        why = "it does not accept the run's token: set the same PENSTOCK_SERVING__TOKEN for all processes"
    log.warning("worker %s returned status %d: %s", worker, status, why)
    raise ApiError(502, f"worker {worker} failed (status {status}): {why}")


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _check_runs(holder: Holder, key: EpisodeKey) -> None:
    """Raise ApiError if the episode ended."""
    if holder.is_committed:
        raise ApiError(410, "this episode ended: open another one")
    if holder.state == JobState.DEAD:
        raise ApiError(410, f"job {key.job} failed too often and is a dead letter: see `penstock dead ls`")
    if holder.state not in (JobState.QUEUED, JobState.LEASED, JobState.DELAYED):
        raise ApiError(410, f"job {key.job} ended, its samples were used or discarded: open another episode")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"an answer of more than {ANSWER_BYTES:,} bytes")
    return bytes(data)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
