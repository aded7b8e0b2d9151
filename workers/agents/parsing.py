"""Parse generated answers into content, reasoning and calls of tools, by the parsers of the engine."""

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

#: Letters of a call's id: the templates of some models accept no other number.
_ID_LETTERS = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    #: JSON text.
    arguments: str

    def to_message(self) -> dict[str, Any]:
        """Return the call as it is in a message of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer, without special tokens."""

    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    #: Whether it ended at a limit of its length.
    is_truncated: bool = False

    def to_message(self) -> dict[str, Any]:
        """Return the answer as a message of OpenAI's API, with ``reasoning_content``."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.to_message() for call in self.tool_calls]}
        return message


class AnswerParser:
    """Parse answers.

    Args:
        tokenizer: a Hugging Face tokenizer.
        tool_call_parser: name of SGLang's parser of calls; None: answers have none.
        reasoning_parser: name of SGLang's parser of reasoning; None: reasoning is content.
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
        """Parse a text with each parser, once. Blocks for a round trip each.

        Raises:
            ConfigError: the engine does not have a parser of this name.
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
        """Return whether an answer of a model that was offered ``tools`` is more than text."""
        return self._reasoning_parser is not None or (self._tool_call_parser is not None and bool(tools))

    async def parse(self, generated: Sequence[int], tools: Tools, name: str, stops: Sequence[str] = ()) -> Answer:
        """Return the parts of an answer; text that cannot be parsed is content.

        Args:
            generated: ids of the answer; a stop id may be the last one.
            name: of the sample and its turn: the same name gives calls the same ids.
            stops: texts that end an answer, and are not part of it.

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
        # A parser may remove the text of calls that it cannot read.
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
            log.warning("%s: its reasoning stays text: %s", name, exc)
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
            log.warning("%s: its calls of tools stay text: %s", name, exc)
            return text, []

    def _plain(self, text: str) -> str:
        return self._special.sub("", text)


def _special_tokens(tokenizer: Any) -> list[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    # The longest first, as one may begin another.
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def _call_id(name: str, index: int) -> str:
    digest = hashlib.blake2b(f"{name}/{index}".encode()).digest()
    return base64.b32encode(digest).decode().lower()[:_ID_LETTERS]
