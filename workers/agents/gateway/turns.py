"""A turn between a client's API and a worker's endpoint: the request, the answer, and errors with an HTTP status."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.errors import PenstockError
from penstock.records.record import Record
from penstock.text import safe_repr
from penstock.workers.agents.requests import MAX_STOP, MAX_STOPS

#: Most characters of an ignored parameter's name that are logged.
MAX_NAME = 64


class ApiError(PenstockError):
    """An error that the client gets, in the format of its API.

    Args:
        status: its HTTP status.
        retry_after_s: when the client may repeat the request; None: not said.
        is_final: repeating the request is useless, whatever the status.
    """

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None, is_final: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    @property
    def headers(self) -> dict[str, str]:
        """Return headers that official clients obey."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"x-should-retry": "false"} if self.is_final else {})


def invalid(message: str) -> ApiError:
    """Return the error for a request that is invalid or cannot be honoured."""
    return ApiError(400, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A client's request for an answer."""

    #: Messages in OpenAI's format; None: the request has a prompt.
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
    #: Parameters that the run decides instead.
    ignored: tuple[str, ...] = ()

    def to_map(self, key: str, *, is_retry: bool) -> dict[str, Any]:
        """Return the request to a worker's endpoint."""
        given = {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}
        options = {"tools": self.tools, "max_tokens": self.max_tokens, "stop": self.stop}
        return {"key": key, **given, **options, "is_retry": is_retry}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """A worker's answer to ``/turn``."""

    #: Name of the turn.
    turn: str | int = ""
    content: str | None = None
    reasoning: str | None = None
    #: ``id``, ``name`` and ``arguments`` (JSON as text) of each.
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
        """Read the answer of a worker of any version of penstock; unknown fields are ignored.

        Raises:
            ProtocolError: a field is invalid or missing.
        """
        known = {one.name for one in fields(cls)}
        return cls.from_map({name: value for name, value in answer.items() if name in known}, "The answer of a worker")

    @property
    def token_names(self) -> list[str]:
        """Return the tokens as ``token_id:N``, since a gateway has no tokenizer."""
        return [f"token_id:{token}" for token in self.tokens]


class Format(ABC):
    """An API: how its requests are read, and its answers written."""

    #: Sent while the turn is generated, to keep a stream open.
    ping: bytes

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """Return the request. Raises ApiError if it is invalid or cannot be honoured."""

    @abstractmethod
    def answer(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        """Return the answer."""

    @abstractmethod
    def events(self, turn: Turn, request: TurnRequest, model: str) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error; as an event it ends a stream that has begun."""

    @abstractmethod
    def event(self, data: Mapping[str, Any]) -> bytes:
        """Return a server-sent event."""


def check_fields(body: Mapping[str, Any], honoured: Iterable[str], refused: frozenset[str]) -> tuple[str, ...]:
    """Return the parameters of a request that are ignored: all but the honoured ones.

    Raises:
        ApiError: it has one of ``refused``; null, false and empty values count as absent.
    """
    given = {name for name, value in body.items() if value is not None}
    if found := sorted(name for name in given & refused if body[name]):
        raise invalid(f"{found[0]} cannot be honoured: remove it from the request.")
    return tuple(sorted(name[:MAX_NAME] for name in given.difference(honoured)))


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean parameter; False if it is absent."""
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid(f"{name} is {safe_repr(value)}: give true or false.")
    return bool(value)


def token_limit(body: Mapping[str, Any], name: str) -> int | None:
    """Return a limit of tokens; None if it is absent."""
    value = body.get(name)
    if value is not None and (type(value) is not int or not 0 < value < 2**31):
        raise invalid(f"{name} is {safe_repr(value)}: give a number of tokens above 0.")
    return value


def stops(body: Mapping[str, Any], name: str) -> list[str]:
    """Return the stop sequences of a request."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or len(found) > MAX_STOPS:
        raise invalid(f"{name} is invalid: give at most {MAX_STOPS} texts.")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found):
        raise invalid(f"{name} has an invalid entry: give texts of 1 to {MAX_STOP} characters.")
    return found


def maps(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects; [] if it is absent."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"{where} is invalid: give a list of objects.")
    return value


def text_at(of: Mapping[str, Any], name: str, where: str) -> str:
    """Return a required text."""
    if not isinstance(value := of.get(name), str):
        raise invalid(f"{where}.{name} must be a string, not {safe_repr(value)}.")
    return value


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message's content: a text, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} is {safe_repr(content)}: give a text or a list of text parts.")
    texts = []
    for index, part in enumerate(maps(content, where)):
        if part.get("type") not in kinds:
            raise invalid(f"{where}.{index} has type {safe_repr(part.get('type'))}: only text can be honoured.")
        texts.append(text_at(part, "text", f"{where}.{index}"))
    return "".join(texts)
