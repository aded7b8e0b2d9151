"""The conversations of environments and agents with a worker's model: rendered, parsed, and how much of them fits."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, EngineDied
from penstock.model.tokenizer import Tokenizer
from penstock.records.sample import Sample
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.parsing import Answer, AnswerParser
from penstock.workers.engine import Engine
from penstock.workers.jobs.environments import Observation

#: Interval of attempts to parse an answer while the engine restarts.
_RETRY_S = 0.5


class ModelChat:
    """Render and parse the conversations with one model."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        #: Most turns of a sample.
        self.max_turns = config.rollout.max_turns
        self._max_context = config.rollout.max_context_tokens
        self._agents = config.agents
        self._parser = AnswerParser(engine, tokenizer, config.agents.tool_call_parser, config.agents.reasoning_parser)
        self._is_verified = False
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return the model's chat template with these variables. Raises ConfigError."""
        key = json.dumps(dict(kwargs), sort_keys=True)
        if key not in self._templates:
            self._templates[key] = ChatTemplate(self._tokenizer, kwargs)
        return self._templates[key]

    def check_parses_calls(self) -> None:
        """Raise ConfigError if calls of tools in answers are not parsed."""
        if self._agents.tool_call_parser is None:
            raise ConfigError(
                "agents.tool_call_parser is missing, and an environment has tools: set it to the parser of the model's "
                "family, such as qwen25."
            )

    @property
    def max_context(self) -> int:
        """Return the most tokens of a part."""
        return min(self._max_context, self._engine.info.max_context)

    def parses(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an answer of a model that was offered ``tools`` is more than text."""
        return self._parser.parses(tools)

    async def verify(self) -> None:
        """Check that the engine has the parsers of section ``agents``. Blocks for a round trip each.

        Raises:
            ConfigError: it does not have them.
            EngineDied: the connection was lost.
        """
        if not self._is_verified:
            await self._parser.verify()
            self._is_verified = True

    async def parse(
        self, generated: Sequence[int], tools: Sequence[Mapping[str, Any]], name: str, stops: Sequence[str] = ()
    ) -> Answer:
        """Return the parts of an answer, as ``AnswerParser.parse``. Waits while the engine, which parses it, restarts.

        Raises:
            ConfigError: the engine does not have the parsers of section ``agents``.
        """
        while True:
            try:
                await self.verify()
                return await self._parser.parse(generated, tools, name, stops)
            except EngineDied:
                await asyncio.sleep(_RETRY_S)

    def has_room(self, sample: Sample, observation: Observation) -> bool:
        """Return whether a turn can follow an observation of token ids."""
        begin = sample.parts[-1] if sample.parts else 0
        length = len(observation.tokens or ()) + (0 if observation.new_part else len(sample.tokens) - begin)
        return sample.num_turns < self.max_turns and length < self.max_context
