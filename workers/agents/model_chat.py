"""The conversations of a worker's environments with its model: rendered, parsed, and how much of them fits."""

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
    """Render and parse the conversations with one model. One instance serves all environments of a worker."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._rollout = config.rollout
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

    async def parse(self, generated: Sequence[int], tools: Sequence[Mapping[str, Any]], name: str) -> Answer:
        """Return the parts of an answer. Waits while the engine, which parses it, restarts.

        Raises:
            ConfigError: the engine does not have the parsers of section ``agents``.
        """
        while True:
            try:
                if not self._is_verified:
                    await self._parser.verify()
                    self._is_verified = True
                return await self._parser.parse(generated, tools, name)
            except EngineDied:
                await asyncio.sleep(_RETRY_S)

    def has_room(self, sample: Sample, observation: Observation) -> bool:
        """Return whether a turn can follow an observation of token ids."""
        begin = sample.parts[-1] if sample.parts else 0
        length = len(observation.tokens or ()) + (0 if observation.new_part else len(sample.tokens) - begin)
        most = min(self._rollout.max_context_tokens, self._engine.info.max_context)
        return sample.num_turns < self._rollout.max_turns and length < most
