"""Responses of the page's server: JSON of any value, and errors as one sentence."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError, ResponseError
from starlette.concurrency import run_in_threadpool

from penstock.console.terminal import json_bytes
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable
from penstock.text import format_exc, redact

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class NotThere(ConfigError):
    """The requested object does not exist."""


class Json(Response):
    """Any value as JSON; NaN and infinity are null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(value: Any) -> bytes:
    """Encode ``value`` as JSON on one line."""
    return json_bytes(value, _OPTIONS)


def explain_errors(app: FastAPI) -> None:
    """Answer errors of penstock and Redis with their sentence; all others are the server's own (500, logged)."""
    app.add_exception_handler(PenstockError, _ours)
    app.add_exception_handler(RedisError, _of_redis)
    app.add_exception_handler(RequestValidationError, _not_taken)


def refusal(status: int, sentence: str) -> Json:
    """Return an error response with a sentence."""
    return Json({"error": redact(sentence)}, status_code=status)


def _ours(_: Request, exc: Exception) -> Response:
    status = {NotThere: 404, ConfigError: 400, ProtocolError: 502, QueueUnavailable: 503}
    return refusal(next((code for kind, code in status.items() if isinstance(exc, kind)), 500), str(exc))


def _of_redis(_: Request, exc: Exception) -> Response:
    return refusal(502 if isinstance(exc, ResponseError) else 503, trouble_of(exc))


def trouble_of(exc: Exception) -> str:
    """Describe an error of redis-py in a sentence; distinguish an error response from no response."""
    if isinstance(exc, ResponseError):
        return f"The run's Redis answers, but not with what penstock keeps there: {format_exc(exc)}."
    return f"The run's Redis does not answer: {format_exc(exc)}."


def _not_taken(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    where = [".".join(map(str, one["loc"][1:])) for one in exc.errors()[:3]]
    return refusal(400, f"This request cannot be read: {', '.join(where)} is not what it should be.")


#: Seconds between two events, and most streams at once: more would mean that a page leaks them.
EVERY_S = 1.0
MAX_STREAMS = 64


class Streams:
    """The open streams."""

    def __init__(self) -> None:
        self.num_open = 0

    def has_room(self) -> bool:
        return self.num_open < MAX_STREAMS

    async def follow(
        self, name: str, read: Callable[[], dict[str, Any]], every_s: float = EVERY_S
    ) -> AsyncIterator[bytes]:
        """Yield an event ``name`` with the result of ``read`` whenever that has changed, else a comment; endless.

        Args:
            read: blocks; called in a thread.
        """
        self.num_open += 1
        before = b""
        try:
            while True:
                now = to_json(await run_in_threadpool(read))
                yield b": as before\n\n" if now == before else b"event: %b\ndata: %b\n\n" % (name.encode(), now)
                before = now
                await asyncio.sleep(every_s)
        finally:
            self.num_open -= 1
