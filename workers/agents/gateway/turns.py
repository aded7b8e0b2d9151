"""Represent a turn between a client's API and a worker's endpoint: request, answer, and errors with an HTTP status."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.errors import PenstockError
from penstock.records.record import Record
from penstock.text import safe_repr
from penstock.workers.agents.requests import MAX_STOP, MAX_STOPS

#: Most logged characters of an ignored parameter's name.
MAX_NAME = 64


class ApiError(PenstockError):
    """Report an error to the client in the format of its API.

    Args:
        status: HTTP status.
        retry_after_s: seconds after which the client may retry; None: not specified.
        is_final: retrying is useless, whatever the status.
    """

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None, is_final: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    @property
    def headers(self) -> dict[str, str]:
        """Return retry headers for official clients."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"x-should-retry": "false"} if self.is_final else {})


def invalid(message: str) -> ApiError:
    """Return the error for an invalid or unsupported request."""
    return ApiError(400, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """Hold a client's request for an answer."""

    #: Messages in OpenAI's format; None if the request has a prompt.
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    #: Tools in OpenAI's format.
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    #: Whether a stream ends with the usage.
    include_usage: bool = False
    #: Whether the answer has the logprobs of its tokens.
    logprobs: bool = False
    #: Names of ignored parameters, which the run's configuration decides.
    ignored: tuple[str, ...] = ()

    def to_map(self, key: str, *, is_retry: bool) -> dict[str, Any]:
        """Return the request body for a worker's endpoint."""
        given = {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}
        options = {"tools": self.tools, "max_tokens": self.max_tokens, "stop": self.stop}
        return {"key": key, **given, **options, "is_retry": is_retry}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """Hold a worker's answer to ``/turn``."""

    #: Name of the turn.
    turn: str | int = ""
    content: str | None = None
    reasoning: str | None = None
    #: ``id``, ``name`` and ``arguments`` (JSON text) of each call.
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    #: stop | length | tool_calls
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Version of the weights.
    version: int = -1
    #: Generated tokens, and their logprobs.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> "Turn":
        """Parse the answer of a worker of any penstock version; ignore unknown fields.

        Raises:
            ProtocolError: a field is invalid or missing.
        """
        known = {one.name for one in fields(cls)}
        return cls.from_map({name: value for name, value in answer.items() if name in known}, "The answer of a worker")

    @property
    def token_names(self) -> list[str]:
        """Return the tokens as ``token_id:N``, because a gateway has no tokenizer."""
        return [f"token_id:{token}" for token in self.tokens]


class Format(ABC):
    """Convert requests and answers of an API."""

    #: Sent during a turn to keep the stream open.
    ping: bytes

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """Parse a request. Raises ApiError if it is invalid or unsupported."""

    @abstractmethod
    def answer(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        """Format an answer."""

    @abstractmethod
    def events(self, turn: Turn, request: TurnRequest, model: str) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """Format an error as a body, or as the last event of a started stream."""

    @abstractmethod
    def event(self, data: Mapping[str, Any]) -> bytes:
        """Format a server-sent event."""


def check_fields(body: Mapping[str, Any], honoured: Iterable[str], refused: frozenset[str]) -> tuple[str, ...]:
    """Return the ignored parameters of a request: all but the supported ones.

    Raises:
        ApiError: a parameter of ``refused`` is present; null, false and empty values count as absent.
    """
    given = {name for name, value in body.items() if value is not None}
    if found := sorted(name for name in given & refused if body[name]):
        raise invalid(f"{found[0]} is not supported: remove it from the request.")
    return tuple(sorted(name[:MAX_NAME] for name in given.difference(honoured)))


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean parameter, False if absent."""
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid(f"{name} is {safe_repr(value)}: send true or false.")
    return bool(value)


def token_limit(body: Mapping[str, Any], name: str) -> int | None:
    """Return a token limit, None if absent."""
    value = body.get(name)
    if value is not None and (type(value) is not int or not 0 < value < 2**31):
        raise invalid(f"{name} is {safe_repr(value)}: send a number of tokens above 0.")
    return value


def stops(body: Mapping[str, Any], name: str) -> list[str]:
    """Return the stop sequences of a request."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or len(found) > MAX_STOPS:
        raise invalid(f"{name} is invalid: send at most {MAX_STOPS} strings.")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found):
        raise invalid(f"{name} has an invalid entry: send strings of 1 to {MAX_STOP} characters.")
    return found


def maps(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, [] if absent."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"{where} is invalid: send a list of objects.")
    return value


def text_at(of: Mapping[str, Any], name: str, where: str) -> str:
    """Return a required string."""
    if not isinstance(value := of.get(name), str):
        raise invalid(f"{where}.{name} must be a string, not {safe_repr(value)}.")
    return value


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message's content, a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} is {safe_repr(content)}: send a string or a list of text parts.")
    texts = []
    for index, part in enumerate(maps(content, where)):
        if part.get("type") not in kinds:
            raise invalid(f"{where}.{index} has type {safe_repr(part.get('type'))}: only text is supported.")
        texts.append(text_at(part, "text", f"{where}.{index}"))
    return "".join(texts)
