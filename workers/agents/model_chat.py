"""Render, parse and bound the conversations of environments and agents with a worker's model."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, EngineDied
from penstock.model.tokenizer import Tokenizer
from penstock.records.sample import Sample
from penstock.workers.agents.chat import ChatTemplate, Tools
from penstock.workers.agents.parsing import Answer, AnswerParser
from penstock.workers.engine import Engine
from penstock.workers.jobs.environments import Observation

#: Seconds between attempts to parse an answer while the engine restarts.
_RETRY_S = 0.5


class ModelChat(AnswerParser):
    """Render and parse conversations with one model."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> None:
        agents = config.agents
        super().__init__(engine, tokenizer, agents.tool_call_parser, agents.reasoning_parser)
        #: Most turns of a sample.
        self.max_turns = config.rollout.max_turns
        self._max_context = config.rollout.max_context_tokens
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return the model's chat template with these variables. Raises ConfigError."""
        key = json.dumps(dict(kwargs), sort_keys=True)
        if key not in self._templates:
            self._templates[key] = ChatTemplate(self._tokenizer, kwargs)
        return self._templates[key]

    def check_parses_calls(self) -> None:
        """Raise ConfigError if tool calls in answers are not parsed."""
        if self._tool_call_parser is None:
            raise ConfigError(
                "agents.tool_call_parser is missing, but an environment has tools: set the parser of the model family, "
                "such as qwen25."
            )

    @property
    def max_context(self) -> int:
        """Return the largest number of tokens of a part."""
        return min(self._max_context, self._engine.info.max_context)

    async def parse(self, generated: Sequence[int], tools: Tools, name: str, stops: Sequence[str] = ()) -> Answer:
        """Parse an answer like ``AnswerParser.parse``; wait while the engine, which parses it, restarts.

        Raises:
            ConfigError: the engine lacks the parsers of section ``agents``.
        """
        while True:
            try:
                await self.verify()
                return await super().parse(generated, tools, name, stops)
            except EngineDied:
                await asyncio.sleep(_RETRY_S)

    def has_room(self, sample: Sample, observation: Observation) -> bool:
        """Return whether a turn fits after an observation of token ids."""
        begin = sample.parts[-1] if sample.parts else 0
        length = len(observation.tokens or ()) + (0 if observation.new_part else len(sample.tokens) - begin)
        return sample.num_turns < self.max_turns and length < self.max_context
