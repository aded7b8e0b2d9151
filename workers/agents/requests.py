"""Represent requests of an agent for a turn: a chat history, or a text.

The turn that a request continues is found by digests of the request's first messages (or characters), as any change of
the history changes the digest.
"""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from penstock.text import safe_repr
from penstock.workers.agents.chat import ChatTemplate, message_key, normalize

#: Most messages, tools and stop texts of a request, and most characters of a stop text.
MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_STOP = 4096, 512, 16, 256
#: Most bytes of one request.
MAX_REQUEST_BYTES = 8 * 1024 * 1024

T = TypeVar("T")

#: Digests, renders and encodes histories, at a second per megabyte. One thread, as a tokenizer is not thread-safe.
_ENCODING = ThreadPoolExecutor(1, "encode")


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` on a request in the encoding thread; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_ENCODING, work)


class RequestInvalid(ValueError):
    """Report an invalid request; the message is sent to the agent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold the limits of one turn."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class Request(ABC):
    """Hold the context of one turn.

    Attributes:
        size: number of messages or characters.
        limits: limits of the turn.
        is_retry: the client may have sent the request before; an existing answer is repeated.
        answered: future of the answer, a JSON object, or RequestInvalid.
    """

    size: int
    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, limits: Limits, *, is_retry: bool) -> None:
        self.limits = limits
        self.is_retry = is_retry
        self.answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    @property
    def request_digest(self) -> bytes:
        """Return the digest of the complete request."""
        return self.digest(self.size)

    @abstractmethod
    def digest(self, n: int) -> bytes:
        """Return the digest of the first ``n`` messages or characters."""

    def continues(self, size: int, answer: bytes, length: int) -> bool:
        """Return whether the first ``size`` messages or characters are followed by an answer and more.

        Args:
            answer: digest of the answer.
            length: number of messages or characters of the answer.
        """
        end = size + length
        return end < self.size and self._part(size, end) == answer

    @abstractmethod
    def answer_digest(self, answer: dict[str, Any]) -> tuple[bytes, int]:
        """Return the digest of an answer as later requests contain it, and its number of messages or characters."""

    @abstractmethod
    def start(self) -> list[int]:
        """Return the tokens of the complete context. Raises RequestInvalid."""

    @abstractmethod
    def continuation(self, size: int, length: int, generated: Sequence[int]) -> list[int] | None:
        """Return the tokens after an answer, or None if appending tokens cannot continue it. Raises RequestInvalid.

        Args:
            size, length: size of the answered request, and length of its answer.
            generated: token ids of that answer.
        """

    @abstractmethod
    def _part(self, start: int, end: int) -> bytes:
        """Return the digest of the messages or characters between two positions."""


class ChatRequest(Request):
    """Represent a chat history with the agent's tools."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        chat: ChatTemplate,
        limits: Limits,
        *,
        is_retry: bool,
    ) -> None:
        super().__init__(limits, is_retry=is_retry)
        self.messages = messages
        self.tools = tools
        self.size = len(messages)
        self._chat = chat

    @cached_property
    def _digests(self) -> list[bytes]:
        found = [_digest(self.tools)]
        for message in self.messages:
            found.append(_digest(message_key(message), found[-1]))
        return found

    def digest(self, n: int) -> bytes:
        return self._digests[n]

    def _part(self, start: int, end: int) -> bytes:
        return _digest([message_key(one) for one in self.messages[start:end]])

    def answer_digest(self, answer: dict[str, Any]) -> tuple[bytes, int]:
        calls = [{"function": call} for call in answer["tool_calls"]]
        message = {"role": "assistant", "content": answer["content"], "tool_calls": calls}
        return _digest([message_key(one) for one in normalize([message])]), 1

    def start(self) -> list[int]:
        try:
            return self._chat.start(self.messages, self.tools)
        except ValueError as exc:
            raise RequestInvalid(str(exc)) from exc

    def continuation(self, size: int, length: int, generated: Sequence[int]) -> list[int] | None:
        try:
            return self._chat.continuation(self.messages, size, self.tools, generated)
        except ValueError as exc:
            raise RequestInvalid(str(exc)) from exc


class TextRequest(Request):
    """Represent a text that is continued without a chat template."""

    def __init__(self, text: str, chat: ChatTemplate, limits: Limits, *, is_retry: bool) -> None:
        super().__init__(limits, is_retry=is_retry)
        self.text = text
        self.size = len(text)
        self._chat = chat

    def digest(self, n: int) -> bytes:
        return _digest(self.text[:n])

    def _part(self, start: int, end: int) -> bytes:
        return _digest(self.text[start:end])

    def answer_digest(self, answer: dict[str, Any]) -> tuple[bytes, int]:
        text = answer["content"] or ""
        return _digest(text), len(text)

    def start(self) -> list[int]:
        return self._chat.encode(self.text)

    def continuation(self, size: int, length: int, generated: Sequence[int]) -> list[int] | None:
        end = size + length
        return self._chat.text_continuation(self.text[size:end], self.text[end:], generated)


def _digest(value: Any, before: bytes = b"") -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def read_request(body: Any, chat: ChatTemplate) -> Request:
    """Parse the body of ``POST /turn``. Raises RequestInvalid."""
    if not isinstance(body, dict):
        raise RequestInvalid("the request is not a JSON object")
    limits = Limits(_max_tokens(body.get("max_tokens")), _stops(body.get("stop")))
    is_retry = body.get("is_retry") is not False
    if isinstance(text := body.get("prompt"), str) and text:
        return TextRequest(text, chat, limits, is_retry=is_retry)
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestInvalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS or not all(isinstance(one, dict) for one in tools):
        raise RequestInvalid(f"tools must be a list of at most {MAX_TOOLS} tools")
    try:
        read = normalize(messages)
    except ValueError as exc:
        raise RequestInvalid(str(exc)) from exc
    if read[-1]["role"] == "assistant":
        raise RequestInvalid("the last message has role assistant: end with a message for the assistant to answer")
    return ChatRequest(read, tools, chat, limits, is_retry=is_retry)


def _max_tokens(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise RequestInvalid(f"max_tokens is {safe_repr(value)}: send a number above 0")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise RequestInvalid(f"stop must be a string, or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops):
        raise RequestInvalid(f"each string in stop must have 1 to {MAX_STOP} characters")
    return tuple(stops)
