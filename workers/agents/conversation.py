"""Write an environment as a program that calls the model; the worker generates its answers.

    class Debate(ConversationEnvironment):
        async def run(self, job: Job) -> float:
            question = {"role": "user", "content": job.prompt}
            first = await self.ask([question])
            doubt = {"role": "user", "content": "Are you sure?"}
            second = await self.ask([question, first.to_message(), doubt])
            return float(job.label in second.content)

Answers keep their generated tokens: messages that extend the last conversation add only new tokens, other messages
start a new part of the sample.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from penstock.records.job import Job
from penstock.records.sample import FinishReason, Sample
from penstock.system.user_code import guarded
from penstock.workers.agents.chat import Message, message_key, normalize
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.agents.parsing import Answer
from penstock.workers.jobs.environments import Observation

Schemas = list[dict[str, Any]]


class ConversationFull(Exception):
    """Signal that no further answer fits into ``rollout.max_turns`` or ``rollout.max_context_tokens``."""


@dataclass(eq=False, slots=True)
class _Request:
    messages: list[Message]
    tools: Schemas
    answered: "asyncio.Future[Answer]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: Answer | None = None

    def extends(self, last: "_Request") -> bool:
        """Return whether the messages extend those of ``last`` and its answer."""
        size = len(last.messages)
        if self.tools != last.tools or self.messages[:size] != last.messages or len(self.messages) == size:
            return False
        assert last.answer is not None
        [answer] = normalize([last.answer.to_message()])
        return message_key(self.messages[size]) == message_key(answer)


class ConversationEnvironment(ABC):
    """Run a program that calls the model. Subclasses override ``run``."""

    #: Variables of the chat template, such as ``enable_thinking``.
    template_kwargs: ClassVar[Mapping[str, Any]] = {}
    #: No limits besides the run's. With this attribute, truncated turns count as answers too.
    turn_limits: ClassVar[Mapping[str, Any]] = {}
    #: The sample after the last answer. ``run`` may set its ``reward_info``.
    sample: Sample

    def __init__(self, chat: ModelChat) -> None:
        self._chat = chat
        self._template = chat.template(self.template_kwargs)
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()
        self._program: asyncio.Task[float | None] | None = None
        self._last: _Request | None = None

    @abstractmethod
    async def run(self, job: Job) -> float | None:
        """Run one sample; return its reward, or None to have the job's reward function compute it."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Return the model's answer to a conversation. Blocks until the answer is generated.

        Args:
            messages: messages in OpenAI's format.
            tools: OpenAI schemas.

        Raises:
            ConversationFull: no further answer fits.
            ConfigError: tools are given, but ``agents.tool_call_parser`` is not set.
            ValueError: a message is invalid.
        """
        if tools:
            self._chat.check_parses_calls()
        request = _Request(normalize(messages), [dict(tool) for tool in tools])
        self._requests.put_nowait(request)
        return await request.answered

    async def reset(self, job: Job) -> Observation:
        """Start the program; return the prompt of its first request."""
        await self.close()
        requests = self._requests = asyncio.Queue()
        self._program = asyncio.create_task(guarded(lambda: self.run(job)))
        self._program.add_done_callback(lambda _: requests.put_nowait(None))
        request = await self._next()
        if request is None:
            raise ValueError("its run ended without calling ask")
        self._last = request
        return Observation(tokens=self._template.start(request.messages, request.tools))

    async def step(self, sample: Sample) -> Observation | None:
        """Pass the last turn to the program; return its next request, or None once it has ended."""
        assert self._last is not None
        self.sample, last = sample, self._last
        generated = sample.tokens[sample.last_turn_start :]
        answer = await self._chat.parse(generated, last.tools, f"{sample.id}/{sample.num_turns - 1}")
        last.answer = replace(answer, is_truncated=sample.finish_reason == FinishReason.LENGTH)
        if not last.answered.done():
            last.answered.set_result(last.answer)
        request = await self._next()
        if request is None:
            self._end()
            return None
        observation = self._observation(request, last, generated)
        self._last = request
        if not self._chat.has_room(sample, observation):
            await self._refuse(request)
        return observation

    async def close(self) -> None:
        """Cancel the program if it is running."""
        if self._program is not None and not self._program.done():
            self._program.cancel()
            await asyncio.wait({self._program})

    async def _next(self) -> _Request | None:
        """Return the next request, or None at the end of the program; re-raise exceptions of the program."""
        request = await self._requests.get()
        if request is None:
            assert self._program is not None
            self._program.result()
        return request

    async def _refuse(self, request: _Request | None) -> None:
        """Fail this and all later requests with ConversationFull until the program ends."""
        while request is not None:
            if not request.answered.done():
                request.answered.set_exception(ConversationFull("no further answer fits into the sample"))
            request = await self._next()
        self._end()

    def _end(self) -> None:
        assert self._program is not None
        reward = self._program.result()
        if reward is not None:
            self.sample.reward = reward

    def _observation(self, request: _Request, last: _Request, generated: Sequence[int]) -> Observation:
        if request.extends(last):
            answer = len(last.messages)
            ids = self._template.continuation(request.messages, answer, request.tools, generated)
            if ids is not None:
                return Observation(tokens=ids)
        return Observation(tokens=self._template.start(request.messages, request.tools), new_part=True)
