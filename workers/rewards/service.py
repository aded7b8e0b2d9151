"""JSON requests to an HTTP service with limits, retries and pauses; bodies are bounded, and redirects refused.

A redirect would send answers to an address that no configuration names.
"""

import asyncio
import json
import logging
import random
from typing import TYPE_CHECKING, Any, Protocol

from penstock.records.job import JobFailure
from penstock.records.worker_causes import ServiceCalled
from penstock.text import format_exc, redact, safe_repr
from penstock.workers.hooks.open_calls import calling, record_failure

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

#: Longest pause between two attempts, in seconds; it doubles from 1 s.
MAX_PAUSE_S = 10.0
#: Most bytes of a request, and of an answer; logprobs take about 40 for each token.
MAX_BYTES = 32 * 1024**2
#: Statuses besides 5xx that are worth a retry: request timeout, too many requests.
_BUSY = (408, 429)
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class Limits(Protocol):
    """Limits of a service in its configuration."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def concurrency(self) -> int: ...


class ServiceFailed(Exception):
    """The service gave no answer.

    Args:
        outcome: named failure of the reward.
        message: why, without a full stop.
    """

    def __init__(self, outcome: JobFailure, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class PathMissing(ServiceFailed):
    """The service responds, but this path does not exist."""


class ServiceAway(ServiceFailed):
    """The service is unreachable: refused, silent, or failing with a status of 5xx, whatever the request."""


class _Failed(Exception):
    """One attempt failed.

    Args:
        is_away: the service may be the cause, not the request.
    """

    def __init__(self, message: str, *, is_away: bool = False) -> None:
        super().__init__(message)
        self.is_away = is_away


def _try_failures(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions that are worth a retry; aiohttp is imported only by processes that call a service."""
    import aiohttp

    return (_Failed, aiohttp.ClientError, TimeoutError, OSError, *more)


class Service:
    """Client of one service, for one worker.

    Args:
        key: the configuration section with its limits and its address.
        called: its name in waits; '': ``key``.
    """

    def __init__(self, limits: Limits, key: str, called: str = "") -> None:
        self._limits = limits
        self._key = key
        self._called = called or key
        self._free = asyncio.Semaphore(limits.concurrency)
        self._session: aiohttp.ClientSession | None = None
        #: Whether it was unreachable at the latest request.
        self._is_away = False

    async def ask(
        self, url: str, question: Any, *, may_miss: bool = False, probe: Any = None, waits: bool = False
    ) -> Any:
        """Return the service's answer to a POST. Waits for ``max_attempts`` and the pauses between them.

        The call is recorded for waits (``hooks/open_calls.py``).

        Args:
            may_miss: status 404 raises PathMissing at once instead of counting as a failed attempt.
            probe: a request that the service can always answer. It is sent if the last attempt was refused, timed out,
                or failed with a status of 5xx: if it is answered, ``question`` has one more attempt; if not, the
                service counts as unreachable. None: no probe, and the service never counts as unreachable.
            waits: wait for an unreachable service without limit.

        Raises:
            ServiceAway: the service is unreachable, and ``waits`` is False.
            PathMissing: see ``may_miss``.
            ServiceFailed: reward_too_large (the request, or the answer), reward_timeout (the last attempt timed out),
                reward_raised (the last attempt failed, the service redirects, or the request cannot be JSON).
        """
        limits = self._limits
        body, probing = _body(question), _body(probe)
        if len(body) > MAX_BYTES:
            raise self._too_large(f"its request has {len(body):,} bytes")
        with calling(self._key, ServiceCalled(self._called, redact(url))):
            attempt, is_last = 0, False
            while True:
                try:
                    return await self._try(url, body, may_miss=may_miss)
                except _try_failures() as exc:
                    attempt += 1
                    if attempt >= limits.max_attempts:
                        if probe is None or is_last or not _is_away(exc):
                            raise self._failed(ServiceFailed, attempt, exc) from exc
                        is_last = await self._is_reachable(url, probing)
                        if not (is_last or waits):
                            raise self._failed(ServiceAway, attempt, exc) from exc
                if not is_last:
                    await self._pause(attempt - 1)

    def _failed(self, kind: type[ServiceFailed], tries: int, last: Exception) -> ServiceFailed:
        outcome = JobFailure.REWARD_TIMEOUT if isinstance(last, TimeoutError) else JobFailure.REWARD_RAISED
        return kind(outcome, f"{tries} tries failed, the last with {_why(last)}")

    async def answers(self, url: str, probe: Any) -> bool:
        """Return whether it answers ``probe``, as in ``ask``. Waits for one attempt."""
        with calling(self._key, ServiceCalled(self._called, redact(url))):
            return await self._is_reachable(url, _body(probe))

    async def _is_reachable(self, url: str, probe: bytes) -> bool:
        """Return whether it answers a valid request."""
        try:
            await self._try(url, probe, may_miss=False)
        except _try_failures(ServiceFailed) as exc:
            is_away = _is_away(exc)
            if is_away and not self._is_away:
                self._is_away = True
                log.warning("%s at %s is unreachable, waiting for it: %s", self._called, redact(url), _why(exc))
            return not is_away
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _try(self, url: str, body: bytes, *, may_miss: bool) -> Any:
        try:
            async with self._free, asyncio.timeout(self._limits.timeout_s):
                answer = await self._post(url, body, may_miss=may_miss)
        except _try_failures() as exc:
            record_failure(self._key, _why(exc))
            # A cancellation that arrives as the timeout expires may look like one, and the wait would never end.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from exc
            raise
        record_failure(self._key, "")
        if self._is_away:
            self._is_away = False
            log.warning("%s at %s responds again", self._called, redact(url))
        return answer

    async def _pause(self, attempt: int) -> None:
        """Wait, with jitter, so that a service that comes back does not get all requests at once."""
        await asyncio.sleep(min(2.0 ** min(attempt, 32), MAX_PAUSE_S) * random.uniform(0.5, 1.0))

    async def _post(self, url: str, body: bytes, *, may_miss: bool) -> Any:
        async with self._opened().post(url, data=body, headers=_HEADERS, allow_redirects=False) as answer:
            if 300 <= answer.status < 400:
                raise ServiceFailed(
                    JobFailure.REWARD_RAISED,
                    f"{redact(url)} redirects ({answer.status}), which is refused: set {self._key}.url to where it "
                    "leads",
                )
            if answer.status == 404 and may_miss:
                raise PathMissing(JobFailure.REWARD_RAISED, f"{redact(url)} does not exist (404)")
            if answer.status != 200:
                raise _Failed(f"status {answer.status}", is_away=answer.status in _BUSY or answer.status >= 500)
            text = bytearray()
            async for chunk in answer.content.iter_any():
                text += chunk
                if len(text) > MAX_BYTES:
                    raise self._too_large("its answer has more bytes")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _Failed(f"an answer that is no JSON: {format_exc(exc)}") from exc

    def _too_large(self, what: str) -> ServiceFailed:
        return ServiceFailed(JobFailure.REWARD_TOO_LARGE, f"{what}; at most {MAX_BYTES:,}")

    def _opened(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                # A server may close a kept connection at any time, for instance after a 500; a request just sent on
                # it would fail, and a running service would look unreachable.
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _is_away(failure: Exception) -> bool:
    """Return whether an attempt may have failed because of the service alone."""
    if isinstance(failure, _Failed):
        return failure.is_away
    import aiohttp

    return isinstance(failure, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError))


def _why(failure: Exception) -> str:
    return str(failure) if isinstance(failure, _Failed) else redact(format_exc(failure))


def _body(question: Any) -> bytes:
    try:
        return json.dumps(question, allow_nan=False).encode()
    except ValueError as exc:
        entries = question.items() if isinstance(question, dict) else []
        what = next((f"{name} {safe_repr(value)}" for name, value in entries if not _is_json(value)), "request")
        raise ServiceFailed(
            JobFailure.REWARD_RAISED,
            f"its {what} cannot be sent as JSON, which has no NaN and no infinity: write such numbers as text",
        ) from exc


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
