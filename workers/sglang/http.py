"""Send HTTP requests to one server with bounded answers; failures raise EngineError."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from penstock.config import EngineConfig
from penstock.errors import EngineDied, EngineError, EngineRefused
from penstock.workers.sglang.stream import read_body, read_head

_JSON = {"Content-Type": "application/json"}
#: Seconds before idle connections are closed; SGLang closes them after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE).
KEEP_S = 3.0


class ConnectionClosed(EngineDied):
    """Report that the server closed a reused connection before any byte of the answer."""


def open_session(*, connect_s: float | None = None, auto_decompress: bool = True) -> aiohttp.ClientSession:
    """Open a session that uses a new connection for each request.

    A server may close an idle connection at any time, for instance after a 500. A request just sent on it fails as if
    the engine had died, and cannot be retried, because it may have been executed.

    Args:
        connect_s: time limit for connecting; None: the limit of the request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=auto_decompress,
    )


def _open_kept_session(connect_s: float) -> aiohttp.ClientSession:
    """Open a session that reuses connections; a reuse appends to the list in the request's ``trace_request_ctx``."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_record_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        trace_configs=[trace],
    )


async def _record_reuse(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    context.trace_request_ctx.append(True)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Hold the open connections to one server."""

    #: Session with a new connection for each request.
    single: aiohttp.ClientSession
    #: Session for generate requests, which may be retried.
    kept: aiohttp.ClientSession
    #: Time limits of requests in flight.
    limits: set[asyncio.Timeout] = field(default_factory=set)

    async def close(self) -> None:
        """Close the connections and cancel requests in flight, whose reads aiohttp would never end."""
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(0)
        await self.single.close()
        await self.kept.close()


class EngineHttp:
    """Send requests to one address. Not thread-safe.

    Args:
        name: name of the engine in errors.
        config: time limits.
        most_bytes: returns the largest answer or event for a request body, in bytes.
        ended: returns how the server's process exited, as the end of a sentence; '' if unknown.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        most_bytes: Callable[[dict[str, Any] | None], int],
        ended: Callable[[], str],
    ) -> None:
        #: Base URL of requests.
        self.url = ""
        self._name = name
        self._config = config
        self._most_bytes = most_bytes
        self._ended = ended
        self._sessions: Sessions | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Open session with a new connection for each request. Raises EngineDied if it is closed."""
        return self._open_sessions.single

    @property
    def _open_sessions(self) -> Sessions:
        if self._sessions is None:
            raise EngineDied(f"engine {self._name} is not running.")
        return self._sessions

    @property
    def is_open(self) -> bool:
        return self._sessions is not None

    def open(self) -> None:
        self._sessions = Sessions(open_session(connect_s=10), _open_kept_session(10))

    def detach(self) -> Sessions | None:
        """Detach and return the sessions for the caller to close, which ends requests in flight with EngineDied."""
        sessions, self._sessions = self._sessions, None
        return sessions

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        ok: Iterable[int] = (200,),
        is_json: bool = True,
        keep: bool = False,
    ) -> Any:
        """Send one request; return the decoded answer.

        Args:
            keep: reuse an idle connection, and keep it open.

        Raises:
            ConnectionClosed: the server closed the reused connection; it may have read the request.
            EngineRefused: the server answered 400.
            EngineError: another status not in ``ok``, a timeout, or an answer that is not JSON.
            EngineDied: the connection was lost.
        """
        async with self.request(method, path, body, timeout_s, keep=keep) as response:
            status = response.status
            if status in ok:
                answer = await read_body(response.content, self._most_bytes(body))
            else:
                answer = await read_head(response.content)
        if status not in ok:
            raise self.refusal(path, status, answer)
        try:
            return orjson.loads(answer) if answer and is_json else {}
        except orjson.JSONDecodeError as exc:
            raise EngineError(f"engine {self._name} returned invalid JSON for {path}: {answer[:200]!r}.") from exc

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, *, keep: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response before its body is read; raises like ``call``."""
        sessions, reused = self._open_sessions, list[bool]()
        session = sessions.kept if keep else sessions.single
        limit_s = timeout_s if timeout_s is not None else self._config.health_timeout_s * self._config.health_failures
        limit = asyncio.timeout(limit_s)
        data = orjson.dumps(body) if body is not None else None
        sessions.limits.add(limit)
        try:
            async with (
                limit,
                session.request(
                    method, self.url + path, data=data, headers=_JSON, trace_request_ctx=reused
                ) as response,
            ):
                reused.clear()
                yield response
        except TimeoutError as exc:
            if sessions is not self._sessions:
                raise EngineDied(f"engine {self._name} was stopped during {path}.") from exc
            raise EngineError(f"engine {self._name} did not answer {path} within {limit_s:g} s.") from exc
        except (aiohttp.ClientError, ConnectionError) as exc:
            lost = ConnectionClosed if reused and sessions is self._sessions else EngineDied
            raise lost(f"engine {self._name} was lost during {path} ({exc!r}){self._ended()}.") from exc
        finally:
            sessions.limits.discard(limit)

    def refusal(self, path: str, status: int, answer: bytes) -> EngineError:
        refused = EngineRefused if status == 400 else EngineError
        return refused(f"engine {self._name} answered {path} with {status}: {answer[:500].decode(errors='replace')}")
