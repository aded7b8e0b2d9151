"""Parse generated answers into content, reasoning and tool calls with the engine's parsers."""

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.workers.agents.chat import Tools
from penstock.workers.engine import Engine

log = logging.getLogger(__name__)

#: Length of a call id; the templates of some models accept no other length.
_ID_LETTERS = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold one tool call."""

    id: str
    name: str
    #: Arguments as JSON text.
    arguments: str

    def to_message(self) -> dict[str, Any]:
        """Convert the call to OpenAI's message format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold the parts of an answer, without special tokens."""

    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    #: Whether the answer ended at a length limit.
    is_truncated: bool = False

    def to_message(self) -> dict[str, Any]:
        """Convert the answer to OpenAI's message format, with ``reasoning_content``."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.to_message() for call in self.tool_calls]}
        return message


class AnswerParser:
    """Parse answers with the parsers of the engine.

    Args:
        tokenizer: Hugging Face tokenizer.
        tool_call_parser: name of SGLang's parser of tool calls; None: calls are not parsed.
        reasoning_parser: name of SGLang's parser of reasoning; None: reasoning is part of the content.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._is_verified = False
        self._special = re.compile("|".join(re.escape(token) for token in _special_tokens(tokenizer)) or "(?!)")

    async def verify(self) -> None:
        """Test each parser once on a text. Blocks for a round trip each.

        Raises:
            ConfigError: the engine has no parser of this name.
            EngineDied: the connection was lost.
        """
        if self._is_verified:
            return
        tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
        try:
            if self._tool_call_parser is not None:
                await self._engine.parse_calls("a", [tool], self._tool_call_parser)
            if self._reasoning_parser is not None:
                await self._engine.separate_reasoning("a", self._reasoning_parser)
        except EngineDied:
            raise
        except EngineError as exc:
            raise ConfigError(
                f"agents.tool_call_parser {self._tool_call_parser!r} and agents.reasoning_parser "
                f"{self._reasoning_parser!r} must be parsers of the engine's SGLang, or null: {exc}"
            ) from exc
        self._is_verified = True

    def parses(self, tools: Tools) -> bool:
        """Return whether an answer to a request with ``tools`` needs parsing."""
        return self._reasoning_parser is not None or (self._tool_call_parser is not None and bool(tools))

    async def parse(self, generated: Sequence[int], tools: Tools, name: str, stops: Sequence[str] = ()) -> Answer:
        """Split an answer into its parts; text that cannot be parsed becomes content.

        Args:
            generated: token ids of the answer; a stop id may be the last one.
            name: name of sample and turn, from which call ids are derived.
            stops: texts that end an answer and are removed from it.

        Raises:
            EngineDied: the connection was lost.
        """
        ids = list(generated)
        if ids and ids[-1] in self._engine.eos_token_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        for stop in stops:
            text = text.partition(stop)[0]
        reasoning, text = await self._separate_reasoning(text, name)
        content, calls = await self._parse_calls(text, tools or (), name)
        # A parser may remove calls that it cannot parse: keep their text.
        parsed = [ToolCall(_call_id(name, index), *call) for index, call in enumerate(calls)]
        return Answer(self._plain(content if calls else text), self._plain(reasoning), parsed)

    async def _separate_reasoning(self, text: str, name: str) -> tuple[str, str]:
        if self._reasoning_parser is None:
            return "", text
        try:
            return await self._engine.separate_reasoning(text, self._reasoning_parser)
        except EngineDied:
            raise
        except EngineError as exc:
            log.warning("%s: failed to parse its reasoning, kept as text: %s", name, exc)
            return "", text

    async def _parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], name: str
    ) -> tuple[str, list[tuple[str, str]]]:
        if self._tool_call_parser is None or not tools:
            return text, []
        try:
            return await self._engine.parse_calls(text, tools, self._tool_call_parser)
        except EngineDied:
            raise
        except EngineError as exc:
            log.warning("%s: failed to parse its tool calls, kept as text: %s", name, exc)
            return text, []

    def _plain(self, text: str) -> str:
        return self._special.sub("", text)


def _special_tokens(tokenizer: Any) -> list[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    # Longest first, because a token may be a prefix of another.
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def _call_id(name: str, index: int) -> str:
    digest = hashlib.blake2b(f"{name}/{index}".encode()).digest()
    return base64.b32encode(digest).decode().lower()[:_ID_LETTERS]
