"""Find the worker that holds an episode's job, and send it requests until one is answered.

A worker that is lost loses its job, and another one leases it; meanwhile a request waits, and is then sent to that one.
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

#: Longest wait for Redis before a client gets an error.
REDIS_S = 10.0
#: Longest wait for a connection to a worker, and for its answer to ``/open``.
CONNECT_S, OPEN_S = 10.0, 10.0
#: Pause before a worker is looked for again: the first one, and the longest.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
#: Seconds between two checks whether a worker that was sent a request still holds the job.
CHECK_S = 2.0
#: Seconds between two reads of the workers' presence, and between two rounds for an episode.
PRESENCE_S, ROUND_S = 0.5, 0.25
#: Most bytes of a worker's answer.
ANSWER_BYTES = 64 * 1024 * 1024
#: When a client without an episode may ask again, in seconds.
RETRY_S = 2
#: Longest time for which an episode is kept whose client left before it got the key.
SPARE_S = 30.0

#: A valid address: writers in Redis must not make a gateway send the run's token anywhere else.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
#: Statuses of a worker that a client gets as they are.
_PASSED_ON = (400, 409, 410, 413)


class Lost(Exception):
    """A worker did not answer, or answers that another one must.

    Args:
        worked_s: for how long it had the request.
    """

    def __init__(self, message: str, worked_s: float = 0.0) -> None:
        super().__init__(message)
        self.worked_s = worked_s


@dataclass(frozen=True, slots=True)
class Holder:
    """State of an episode's job."""

    #: A ``JobState``; '': the job does not exist.
    state: str
    #: The worker that has leased it; '': none.
    worker: str
    #: Whether the episode's sample is committed.
    is_committed: bool


class Routing:
    """Requests of one gateway to the workers of its run.

    Args:
        token: the run's.
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
        #: Episodes whose client left before it got the key, with the time of each.
        self._spare: list[tuple[float, dict[str, Any]]] = []

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._control.close()

    async def open_episode(self, wait_s: float) -> dict[str, Any]:
        """Return an episode without an agent; wait for one for up to ``wait_s``.

        Raises:
            ApiError: no worker has one.
            QueueUnavailable: Redis does not answer.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        while True:
            # One round at a time: if it finds nothing, others need not ask the same workers again.
            async with self._opening:
                if (found := await self._next_episode()) is not None:
                    return found
            if loop.time() >= give_up:
                raise ApiError(429, await self._why_no_episode(), retry_after_s=RETRY_S)
            await asyncio.sleep(ROUND_S)

    async def call(self, path: str, key: EpisodeKey, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the worker that holds the episode's job; wait while no worker does.

        A request that was lost with its worker is repeated, with ``is_retry``.

        Raises:
            ApiError: the episode has ended, the worker refuses the request, or no worker held the job for
                ``agents.idle_s``.
        """
        loop = asyncio.get_running_loop()
        give_up, failures = loop.time() + self._idle_s, 0
        while True:
            try:
                return await self._call_holder(path, key, body)
            except QueueUnavailable as exc:
                why = str(exc)
            except Lost as exc:
                why, give_up = str(exc), give_up + exc.worked_s
            if loop.time() >= give_up:
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
        """Send a request to the holder of the job, if it has one; raise Lost if it is to be sent again."""
        holder = await self._holder(key)
        _check_runs(holder, key)
        worker = (await self._live_workers()).get(holder.worker)
        if worker is None or not worker.agents_url:
            raise Lost(f"job {key.job} is {holder.state} and waits for a worker")
        request, began = asyncio.create_task(self._post(worker, path, body)), time.monotonic()
        try:
            while not (await asyncio.wait({request}, timeout=CHECK_S))[0]:
                if not await self._still_holds(worker, key):
                    raise Lost(f"worker {worker.name} has lost job {key.job}")
            return request.result()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise Lost(f"worker {worker.name} cannot be reached ({format_exc(exc)})") from exc
        except (Lost, aiohttp.ClientError, OSError) as exc:  # TimeoutError is one
            self._tally.repeats += 1
            if "is_retry" in body:
                body["is_retry"] = True
            why = str(exc) if isinstance(exc, Lost) else f"worker {worker.name} does not answer ({format_exc(exc)})"
            raise Lost(why, time.monotonic() - began) from exc
        finally:
            request.cancel()

    async def _still_holds(self, worker: WorkerPresence, key: EpisodeKey) -> bool:
        try:
            held_by = (await self._holder(key)).worker
            return held_by == worker.name and worker.name in await self._live_workers()
        except QueueUnavailable:
            return True  # the worker decides, by its lease

    async def _holder(self, key: EpisodeKey) -> Holder:
        fields = ["st", "own", f"s:{key.k}"]
        state, owner, token = await self._control.do(lambda client: client.hmget(self._keys.group(key.job), fields))
        return Holder(_text(state), _text(owner), token is not None)

    async def _live_workers(self) -> dict[str, WorkerPresence]:
        """Return the workers that are alive, by name; read at most every ``PRESENCE_S``."""
        loop = asyncio.get_running_loop()
        async with self._reading:
            if loop.time() - self._read_at >= PRESENCE_S:
                records = await self._control.do(lambda client: client.hgetall(self._keys.workers))
                self._workers = {one.name: one for one in parse_workers(records) if one.age_s <= FRESH_S}
                self._read_at = loop.time()
        return self._workers

    async def _next_episode(self) -> dict[str, Any] | None:
        """Ask the workers for an episode, unless the last round has just found none."""
        loop = asyncio.get_running_loop()
        while self._spare:
            kept_at, episode = self._spare.pop()
            if loop.time() - kept_at <= min(SPARE_S, self._idle_s / 2):
                return episode
        if loop.time() < self._next_round:
            return None
        round_ = asyncio.create_task(self._ask_workers())
        try:
            found = await asyncio.shield(round_)
        except asyncio.CancelledError:
            # The client left. An episode that it would have got is for the next one.
            round_.add_done_callback(self._keep)
            raise
        if found is None:
            self._next_round = loop.time() + ROUND_S
        return found

    def _keep(self, round_: "asyncio.Task[dict[str, Any] | None]") -> None:
        if not round_.cancelled() and round_.exception() is None and (found := round_.result()) is not None:
            self._spare.append((asyncio.get_running_loop().time(), found))

    async def _ask_workers(self) -> dict[str, Any] | None:
        workers = [one for one in (await self._live_workers()).values() if one.agents_url]
        random.shuffle(workers)
        # A draining worker can only complete the jobs that it holds if their episodes are opened.
        for worker in sorted(workers, key=lambda one: one.state == WorkerState.DRAINING):
            try:
                async with asyncio.timeout(OPEN_S):
                    answer = await self._post(worker, "/open", {})
            except (Lost, ApiError, aiohttp.ClientError, OSError) as exc:
                log.warning("worker %s opens no episode: %s", worker.name, format_exc(exc))
                continue
            if answer:
                if not isinstance(key := answer.get("key"), str) or len(key) > MAX_KEY:
                    log.warning("worker %s gave an episode without a key", worker.name)
                    continue
                return answer
        return None

    async def _why_no_episode(self) -> str:
        if not any(one.agents_url for one in (await self._live_workers()).values()):
            return (
                "no worker that runs agents' episodes is ready: start one, with a dataset whose environment is agent, "
                "or see `penstock why`"
            )
        records = await self._control.do(lambda client: client.hgetall(self._keys.waits))
        producer = next((one for one in waits_in(records, ()) if one.who == "producer"), None)
        if producer is None:
            return "every leased episode has an agent: ask again when more jobs are leased"
        return f"every leased episode has an agent, and the producer waits: {producer.cause}"

    async def _post(self, worker: WorkerPresence, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer; {} if it has none.

        Raises:
            Lost: another worker must answer, or this one later.
            ApiError: the worker refuses the request.
            aiohttp.ClientError, OSError: it does not answer.
        """
        if not _URL.fullmatch(worker.agents_url):
            raise Lost(f"worker {worker.name} has no valid address for gateways: {safe_repr(worker.agents_url)}")
        try:
            data = orjson.dumps(body)
        except TypeError as exc:  # only its depth can be wrong: the body was parsed from JSON
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
    """Raise the error of a worker's status."""
    if status in (404, 503):
        raise Lost(why)
    if status in _PASSED_ON:
        raise ApiError(status, why, is_final=status == 409)
    if status == 401:
        why = "it does not accept the run's token: give all parts the same PENSTOCK_SERVING__TOKEN"
    log.warning("worker %s answers with status %d: %s", worker, status, why)
    raise ApiError(502, f"worker {worker} failed (status {status}): {why}")


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _check_runs(holder: Holder, key: EpisodeKey) -> None:
    """Raise ApiError if the episode has ended."""
    if holder.is_committed:
        raise ApiError(410, "this episode has ended: open another one")
    if holder.state == JobState.DEAD:
        raise ApiError(410, f"job {key.job} failed too often and is a dead letter: see `penstock dead ls`")
    if holder.state not in (JobState.QUEUED, JobState.LEASED, JobState.DELAYED):
        raise ApiError(410, f"job {key.job} is over: its samples were used or discarded; open another episode")


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
