"""HTTP with one server: failed requests raise EngineError, and the size of answers is limited."""

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
#: Unused connections are closed after this time. SGLang closes them after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE).
KEEP_S = 3.0


class ConnectionClosed(EngineDied):
    """The server closed a connection that earlier requests had used, before any byte of the answer."""


def open_session(*, connect_s: float | None = None, auto_decompress: bool = True) -> aiohttp.ClientSession:
    """Open a session that uses a new connection for each request.

    A server may close a kept connection at any time, for instance after a 500. A request just sent on it fails as if
    the engine had died, and cannot be sent again, because it may have been executed.

    Args:
        connect_s: time limit for connecting; None: that of the request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=auto_decompress,
    )


def _open_kept_session(connect_s: float) -> aiohttp.ClientSession:
    """Open a session that keeps connections open; a request on a used one adds to its ``trace_request_ctx``, a list."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        trace_configs=[trace],
    )


async def _note_reuse(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    context.trace_request_ctx.append(True)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Open connections to one server."""

    #: A new connection for each request.
    single: aiohttp.ClientSession
    #: For requests for tokens, which may be sent again.
    kept: aiohttp.ClientSession
    #: Time limits of requests in flight.
    limits: set[asyncio.Timeout] = field(default_factory=set)

    async def close(self) -> None:
        """Close the connections; end requests in flight, because aiohttp never ends the read of a body."""
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(0)
        await self.single.close()
        await self.kept.close()


class EngineHttp:
    """Requests to one address. All methods belong to one event loop.

    Args:
        name: of the engine, used in errors.
        config: its time limits.
        most_bytes: returns the largest answer to a body, or event of it, in bytes.
        ended: how the server's process ended, as the end of a sentence; '' if unknown.
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
        """The open session, with a new connection for each request. Raises EngineDied if it is closed."""
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
        """Return the sessions, for the caller to close: requests in flight then raise EngineDied. Send nothing more."""
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
            keep: use a kept connection if one is free, and keep it open.

        Raises:
            ConnectionClosed: the server closed the kept connection; it may or may not have read the request.
            EngineRefused: the server answered 400.
            EngineError: another status that is not ``ok``, a timeout, or an answer that is not JSON.
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
            raise EngineError(
                f"engine {self._name} answered {path} with something that is not JSON: {answer[:200]!r}."
            ) from exc

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, *, keep: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response, with its body unread; raises as ``call``."""
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
