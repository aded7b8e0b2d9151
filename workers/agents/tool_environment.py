"""Let a model call tools in an environment.

    def add(a: int, b: int) -> str:
        '''Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        '''
        return str(a + b)


    class Calculator(ToolEnvironment):
        tools = [add]

        async def reward(self, sample: Sample) -> float:
            return float(sample.turns[-1].strip() == sample.job.label)

The model's chat template renders tools and conversation, and the engine's parser (``agents.tool_call_parser``) extracts
the calls of an answer, which run concurrently.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.text import format_exc, utf8_safe
from penstock.workers.agents.chat import Message
from penstock.workers.agents.conversation import ConversationEnvironment, ConversationFull
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.agents.parsing import Answer, ToolCall

#: Most characters of a tool's result; the middle of a longer result is cut out.
MAX_RESULT = 100_000
#: Key of ``reward_info`` with the number of calls that raised.
TOOL_ERRORS = "tool_errors"

Tool = Callable[..., Any] | Mapping[str, Any]


class ToolEnvironment(ConversationEnvironment):
    """Let a model call tools until it answers without a call. Subclasses define tools and reward."""

    #: Functions with annotations and a docstring, or OpenAI schemas of tools that an overridden ``call`` runs.
    tools: Sequence[Tool] = ()
    #: Exceptions of a call that fail the sample; the text of other exceptions becomes the call's result.
    fatal: tuple[type[Exception], ...] = ()

    def __init__(self, chat: ModelChat) -> None:
        super().__init__(chat)
        #: Messages so far, including the model's.
        self.conversation: list[Message] = []
        self._functions: dict[str, Callable[..., Any]] = {}

    async def messages(self, job: Job) -> list[Message]:
        """Return the first messages: ``messages`` of the job's metadata, or its prompt as a user message."""
        return list(job.metadata.get("messages") or [{"role": "user", "content": job.prompt}])

    async def list_tools(self, job: Job) -> Sequence[Tool]:
        """Return the tools of a sample, by default ``tools``."""
        return self.tools

    async def call(self, name: str, arguments: dict[str, Any], sample: Sample) -> Any:
        """Run a tool call; return text or a JSON value. The text of an exception becomes the result too."""
        function = self._functions[name]
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.to_thread(function, **arguments)

    async def respond(self, answer: Answer, sample: Sample) -> list[Message]:
        """Return the messages that follow an answer, by default the results of its calls; [] ends the sample."""
        return list(await asyncio.gather(*(self._result(call, sample) for call in answer.tool_calls)))

    async def reward(self, sample: Sample) -> float | None:
        """Return the reward at the end of the sample, or None to let the job's reward function compute it."""
        return None

    async def run(self, job: Job) -> float | None:
        """Run tool calls until an answer has no calls, or no further answer fits."""
        tools = await self.list_tools(job)
        schemas = [dict(tool) if isinstance(tool, Mapping) else schema_of(tool) for tool in tools]
        self._functions = {tool.__name__: tool for tool in tools if not isinstance(tool, Mapping)}
        self.conversation = await self.messages(job)
        try:
            while messages := await self._turn(schemas):
                self.conversation += messages
        except ConversationFull:
            pass
        return await self.reward(self.sample)

    async def _turn(self, schemas: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Call the model once; return the messages that follow its answer."""
        answer = await self.ask(self.conversation, schemas)
        self.conversation.append(answer.to_message())
        return [] if answer.is_truncated else await self.respond(answer, self.sample)

    async def _result(self, call: ToolCall, sample: Sample) -> Message:
        try:
            result = await self.call(call.name, _arguments(call), sample)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as exc:  # the model chose the arguments
            if isinstance(exc, self.fatal):
                raise
            sample.reward_info[TOOL_ERRORS] = sample.reward_info.get(TOOL_ERRORS, 0) + 1
            text = f"Error: {format_exc(exc)}"
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": utf8_safe(text, MAX_RESULT)}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Build the OpenAI schema of a function from its annotations and docstring.

    Raises:
        Exception: error of transformers that names a missing annotation or docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(function)
    schema["function"].pop("return", None)
    return schema


def _arguments(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call.name} must be a JSON object")
    return arguments
