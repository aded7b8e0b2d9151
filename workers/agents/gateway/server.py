"""Serve the gateway's HTTP API: authentication, limits, episodes, turns and streams."""

import asyncio
import hmac
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from penstock.config import Config
from penstock.errors import EpisodeKeyInvalid, ProtocolError, QueueUnavailable
from penstock.protocol.episode_key import EpisodeKey, key_digest, read_key
from penstock.system.connections import Connections
from penstock.text import safe_repr
from penstock.workers.agents.gateway.anthropic_api import Messages
from penstock.workers.agents.gateway.metrics import Tally
from penstock.workers.agents.gateway.openai_api import Chat, Completions, models
from penstock.workers.agents.gateway.routing import RETRY_S, Routing
from penstock.workers.agents.gateway.turns import ApiError, Format, Turn, invalid
from penstock.workers.agents.requests import MAX_REQUEST_BYTES

log = logging.getLogger(__name__)

#: Most open connections; beyond that, the oldest connection without a request is closed.
MAX_CONNECTIONS = 2048
#: Longest wait for the head of a request, and for the rest of a refused request's body, in seconds.
IDLE_S, LINGER_S = 30.0, 2.0
#: Longest wait for the body of a request, in seconds.
BODY_S = 60.0
#: Seconds between pings of a stream during a turn; errors before the first ping still get their own HTTP status.
PING_S = 10.0
#: Largest total size of the bodies of all open requests, in bytes.
MAX_OPEN_BYTES = 512 * 1024 * 1024
#: Longest wait of ``POST /v1/episodes`` for an episode, in seconds.
MAX_WAIT_S = 60
#: Most open requests of one episode, as agents may be untrusted programs.
MAX_OPEN_REQUESTS = 32
#: Most characters of the error that ends an episode.
MAX_FAILURE = 4_000
#: Most names of ignored parameters that are logged.
MAX_REPORTED = 100
#: Status in the metrics for requests whose client disconnected before the answer.
_LEFT = 499

_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,300}")
_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

#: Number of body bytes read so far.
_BYTES = web.RequestKey("bytes", int)
#: Sample of the episode whose key authorized the request.
_SAMPLE = web.RequestKey("sample", str)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class GatewayServer:
    """Answer requests of agents.

    Args:
        token: token of the run.
    """

    def __init__(self, config: Config, token: str, routing: Routing, tally: Tally) -> None:
        self._config = config
        self._token = token
        self._clients = tuple(config.agents.clients.values()) or (token,)
        self._routing = routing
        self._tally = tally
        self._open_bytes = 0
        #: Open requests of each episode, by sample.
        self._open_requests: Counter[str] = Counter()
        #: Ignored parameters that were already logged.
        self._reported: set[str] = set()
        self.connections = Connections(self._answer, MAX_CONNECTIONS, tally, idle_s=IDLE_S, linger_s=LINGER_S)
        chat = Chat()
        #: Path -> method, handler, and format of turns and errors.
        self._paths: dict[str, tuple[str, Answer, Format]] = {
            "/v1/episodes": ("POST", self._open, chat),
            "/v1/episodes/finish": ("POST", self._finish, chat),
            "/v1/episodes/fail": ("POST", self._fail, chat),
            "/v1/models": ("GET", self._models, chat),
            "/v1/chat/completions": ("POST", self._turn, chat),
            "/v1/completions": ("POST", self._turn, Completions()),
            "/v1/messages": ("POST", self._turn, Messages()),
        }
        self._unknown = chat, Messages()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; format errors for the API of its path."""
        path, status = request.path if request.path in self._paths else "other", _LEFT
        try:
            response = await self._respond(request)
            # Start writing here, while the connection is protected from being closed.
            await response.prepare(request)
            await response.write_eof()
            status = response.status
            return response
        finally:
            self._tally.requests[path, str(status)] += 1
            self._open_bytes -= request.get(_BYTES, 0)
            self._release(request)
            self.connections.free(request.protocol)

    def _release(self, request: web.BaseRequest) -> None:
        """Remove a request from the open requests of its episode."""
        if (sample := request.get(_SAMPLE)) is not None:
            self._open_requests[sample] -= 1
            if not self._open_requests[sample]:
                del self._open_requests[sample]

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        format_: Format = self._unknown[request.path.startswith("/v1/messages")]
        try:
            if (found := self._paths.get(request.path)) is None:
                raise ApiError(404, f"unknown path {request.path[:200]}: see docs/agents.md.")
            method, answer, format_ = found
            if request.method != method:
                raise ApiError(405, f"{request.path} supports only {method}.")
            return await answer(request)
        except ApiError as exc:
            return _failed(format_, exc)
        except EpisodeKeyInvalid as exc:
            return _failed(format_, ApiError(401, str(exc)))
        except QueueUnavailable as exc:
            return _failed(format_, ApiError(503, str(exc), retry_after_s=RETRY_S))
        except ProtocolError as exc:
            log.error("request to %s failed: %s", request.path, exc)
            return _failed(format_, ApiError(502, str(exc)))
        except RecursionError:
            return _failed(format_, invalid("the request is nested too deeply."))
        except ConnectionError:
            raise  # the client disconnected
        except Exception:
            log.exception("request to %s failed", request.path)
            return _failed(format_, ApiError(500, "the gateway failed: check its log."))

    def _key(self, request: web.BaseRequest) -> tuple[str, EpisodeKey]:
        """Return the episode key that authorizes the request. Raises EpisodeKeyInvalid."""
        text = _credential(request)
        key = read_key(self._token, text)
        if self._open_requests[key.sample] >= MAX_OPEN_REQUESTS:
            raise ApiError(429, f"this episode already has {MAX_OPEN_REQUESTS} open requests.", retry_after_s=RETRY_S)
        self._open_requests[key.sample] += 1
        request[_SAMPLE] = key.sample
        self.connections.keep(request.protocol)
        return text, key

    def _check_client(self, request: web.BaseRequest) -> None:
        given = _credential(request).encode(errors="replace")
        # Compare all tokens, so that the time does not reveal the matching one.
        if not sum(hmac.compare_digest(given, token.encode()) for token in self._clients):
            raise ApiError(401, "the client token is invalid: send a token of agents.clients, or the run's token.")
        self.connections.keep(request.protocol)

    async def _open(self, request: web.BaseRequest) -> web.Response:
        self._check_client(request)
        body = await self._body(request)
        wait_s = body.get("wait_s", 0)
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise invalid(f"wait_s is invalid: send a number of seconds from 0 to {MAX_WAIT_S}.")
        base_url = self._base_url(request)
        episode = await self._routing.open_episode(wait_s)
        log.info("opened an episode of job %s, key %s", episode.get("job"), key_digest(episode["key"]))
        return _json({**episode, "base_url": base_url})

    def _base_url(self, request: web.BaseRequest) -> str:
        """Return the address of the API under the host name that the client used."""
        host = request.headers.get("Host", "")
        if not _HOST.fullmatch(host):
            raise invalid("the header Host is invalid: send the name and port of the gateway.")
        return f"{'https' if self._config.agents.is_tls else 'http'}://{host}/v1"

    async def _finish(self, request: web.BaseRequest) -> web.Response:
        text, key = self._key(request)
        body = await self._body(request)
        reward, info = body.get("reward"), body.get("info") or {}
        if reward is not None and type(reward) not in (int, float):
            raise invalid("reward is invalid: send a number, or null to have the job's reward computed.")
        if not isinstance(info, dict):
            raise invalid("info is invalid: send an object.")
        try:
            await self._routing.call("/finish", key, {"key": text, "reward": reward, "info": info})
        except ApiError as exc:
            # The answer to an earlier finish request may have been lost.
            if exc.status not in (409, 410) or not await self._routing.is_committed(key):
                raise
        return _json({})

    async def _fail(self, request: web.BaseRequest) -> web.Response:
        text, key = self._key(request)
        body = await self._body(request)
        if not isinstance(error := body.get("error"), str) or not error:
            raise invalid("error is invalid: send a string with the reason of the failure.")
        await self._routing.call("/fail", key, {"key": text, "error": error[:MAX_FAILURE]})
        return _json({})

    async def _models(self, request: web.BaseRequest) -> web.Response:
        self._key(request)
        return _json(models(self._config.model.name))

    async def _turn(self, request: web.BaseRequest) -> web.StreamResponse:
        text, key = self._key(request)
        format_ = self._paths[request.path][2]
        turn_request = format_.read(await self._body(request))
        self._report(turn_request.ignored)
        work = asyncio.create_task(self._take_turn(key, turn_request.to_map(text, is_retry=_is_retry(request))))
        try:
            await asyncio.wait({work}, timeout=PING_S if turn_request.stream else None)
            if not turn_request.stream:
                return _json(format_.answer(work.result(), turn_request, self._config.model.name))
            if work.done():
                work.result()  # raises errors before the stream starts, so that they get their own status
            response = web.StreamResponse(headers=_STREAM)
            await response.prepare(request)
            try:
                while not work.done():
                    await response.write(format_.ping)
                    await asyncio.wait({work}, timeout=PING_S)
                for event in format_.events(work.result(), turn_request, self._config.model.name):
                    await response.write(event)
            except (ApiError, ProtocolError) as exc:
                error = exc if isinstance(exc, ApiError) else ApiError(502, str(exc))
                await response.write(format_.event(format_.error(error)))
            await response.write_eof()
            return response
        finally:
            work.cancel()

    async def _take_turn(self, key: EpisodeKey, body: dict[str, Any]) -> Turn:
        began = time.monotonic()
        self._tally.open_turns += 1
        try:
            turn = Turn.from_answer(await self._routing.call("/turn", key, body))
        finally:
            self._tally.open_turns -= 1
        self._tally.turn_s += time.monotonic() - began
        return turn

    def _report(self, ignored: tuple[str, ...]) -> None:
        """Log each ignored parameter once, up to ``MAX_REPORTED``, as agents invent names."""
        room = MAX_REPORTED - len(self._reported)
        if new := sorted(set(ignored) - self._reported - {"model"})[:room]:
            self._reported |= set(new)
            log.info(
                "ignored request parameters, which the run's configuration decides: %s", ", ".join(map(safe_repr, new))
            )

    async def _body(self, request: web.BaseRequest) -> Mapping[str, Any]:
        """Read the body of an authorized request, a JSON object, within the limits of size and time."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError(415, "compressed requests are not supported: send the request without Content-Encoding.")
        too_large = ApiError(413, f"the request is larger than {MAX_REQUEST_BYTES:,} bytes.")
        if (request.content_length or 0) > MAX_REQUEST_BYTES:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.content.iter_any():
                    data += chunk
                    request[_BYTES] = len(data)
                    self._open_bytes += len(chunk)
                    if len(data) > MAX_REQUEST_BYTES:
                        raise too_large
                    if self._open_bytes > MAX_OPEN_BYTES:
                        raise ApiError(
                            503, "the gateway has too many large requests: retry later.", retry_after_s=RETRY_S
                        )
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s.") from None
        try:
            body = orjson.loads(bytes(data)) if data else {}
        except orjson.JSONDecodeError as exc:
            raise invalid(f"the request is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise invalid("the request is not a JSON object.")
        return body


def _credential(request: web.BaseRequest) -> str:
    """Return the key or token of a request, or ''."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _is_retry(request: web.BaseRequest) -> bool:
    """Return whether a request may be a retry: official clients send a retry count, other clients none."""
    return request.headers.get("x-stainless-retry-count") != "0"


def _json(answer: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    # json instead of orjson: tool arguments may have integers of any length.
    data = json.dumps(answer, separators=(",", ":")).encode()
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


def _failed(format_: Format, error: ApiError) -> web.Response:
    headers = error.headers | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    response = _json(format_.error(error), error.status, headers)
    if error.status in (401, 408, 413, 415):
        response.force_close()  # the rest of the body is not read
    return response
