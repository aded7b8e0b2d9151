"""Environments that ask the model: programs, and tools. The worker's own loop runs them, against a scripted engine."""

import asyncio
import sys
from typing import Any

import pytest

from penstock import ConversationEnvironment, ConversationFull, ToolEnvironment
from penstock.errors import ConfigError, EngineDied, EnvironmentRaised
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.agents.parsing import Answer
from penstock.workers.agents.tool_environment import schema_of
from tests.chat_templates import THINKING, make_tokenizer
from tests.unit.workers.agents.conversation_parts import (
    JOB,
    TOKENIZER,
    Settings,
)
from tests.unit.workers.agents.conversation_parts import ScriptedEngine as Engine
from tests.unit.workers.agents.conversation_parts import run_environment as run
from tests.unit.workers.agents.conversation_parts import tool_call as call


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Calculator(ToolEnvironment):
    tools = (add,)

    async def reward(self, sample: Sample) -> float:
        return float(self.conversation[-1]["content"] == sample.job.label)


async def test_a_model_calls_tools_until_it_answers() -> None:
    engine = Engine(f"Let me see.\n{call('add', {'a': 1, 'b': 1})}{call('add', {'a': 1, 'b': 2})}", "3")

    sample, environment = await run(Calculator, engine)

    assert sample.reward == 1.0
    assert '"name": "add"' in engine.prompts[0]
    assert '"description": "The first number."' in engine.prompts[0]
    results = engine.prompts[1].rpartition("</tool_call><|im_end|>")[2]
    assert results == (
        "\n<|im_start|>user<tool_response>\n2\n</tool_response><tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [one["role"] for one in environment.conversation] == ["user", "assistant", "tool", "tool", "assistant"]
    assert TOKENIZER.decode([t for t, mask in zip(sample.tokens, sample.generated, strict=True) if mask]) == (
        f"Let me see.\n{call('add', {'a': 1, 'b': 1})}{call('add', {'a': 1, 'b': 2})}<|im_end|>3<|im_end|>"
    )
    assert sample.parts == []


async def test_parallel_calls_run_together() -> None:
    class Meeting(ToolEnvironment):
        tools = (add,)

        def __init__(self, chat: ModelChat) -> None:
            super().__init__(chat)
            self.barrier = asyncio.Barrier(3)

        async def call(self, name: str, arguments: dict[str, Any], sample: Sample) -> str:
            await self.barrier.wait()
            return "met"

    sample, _ = await run(Meeting, Engine(call("add", {}) * 3, "done"))

    assert sample.text.endswith("done")


async def test_what_a_tool_raises_is_its_result_and_counted() -> None:
    engine = Engine(call("add", {"a": 1}) + call("add", [1]) + call("add", {"a": 1, "b": "x"}), "no")

    sample, _ = await run(Calculator, engine)

    results = engine.prompts[1].rpartition("</tool_call><|im_end|>")[2]
    assert "Error: TypeError: add() missing 1 required positional argument: 'b'" in results
    assert "Error: ValueError: the arguments of add must be a JSON object" in results
    assert sample.reward_info["tool_errors"] == 3
    assert sample.reward == 0.0


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 2}, 2), ({"max_context_tokens": 1250}, 1)])
async def test_a_sample_without_room_gets_its_reward_too(limits: dict[str, int], turns: int) -> None:
    class Greedy(Calculator):
        async def call(self, name: str, arguments: dict[str, Any], sample: Sample) -> str:
            return "x" * 1000

        async def reward(self, sample: Sample) -> float:
            return float(sample.num_turns)

    sample, environment = await run(Greedy, Engine(*[call("add", {"a": 1, "b": 2})] * 9), settings=Settings(**limits))

    assert sample.status == "truncated"
    assert sample.reward == sample.num_turns == turns
    assert environment.conversation[-1]["role"] == "tool", "the call of the last turn was made"


async def test_another_worker_repeats_the_calls_of_a_replayable_environment() -> None:
    class Repeated(Calculator):
        replayable = True

    sample, last = Sample(JOB, 0), Engine("3")
    with pytest.raises(EngineDied):
        await run(Repeated, Engine(call("add", {"a": 1, "b": 2})), partial=sample)
    generated = sample.tokens.copy()

    _, environment = await run(Repeated, last, partial=sample)

    assert last.prompts == [TOKENIZER.decode(generated)], "only the second turn is generated"
    assert (sample.reward, sample.num_turns, sample.tokens[: len(generated)]) == (1.0, 2, generated)
    assert [one["role"] for one in environment.conversation] == ["user", "assistant", "tool", "assistant"]


async def test_an_answer_that_is_cut_ends_the_sample() -> None:
    """Its calls are not made."""
    answer = call("add", {"a": 1, "b": 2})
    settings = Settings(sampling={"max_new_tokens": len(TOKENIZER.encode(answer))})

    sample, environment = await run(Calculator, Engine(answer), settings=settings)

    assert (sample.status, sample.reward) == ("truncated", 0.0)
    assert environment.conversation[-1]["role"] == "assistant"


async def test_parsing_waits_for_an_engine_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.agents.model_chat._RETRY_S", 0.0)

    sample, _ = await run(Calculator, Engine("3", deaths=2))

    assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("parser", "error"), [(None, "agents.tool_call_parser is missing"), ("other", "must be parsers of the engine's")]
)
async def test_tools_need_a_parser_of_calls(parser: str | None, error: str) -> None:
    with pytest.raises(EnvironmentRaised, match=error):
        await run(Calculator, Engine("3"), settings=Settings(parser))


async def test_messages_of_the_metadata_are_the_prompt() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    engine = Engine("3")

    await run(Calculator, engine, Job(id="d/0/0", n=1, prompt="hi", metadata={"messages": messages}))

    assert engine.prompts[0].endswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


class Twice(ConversationEnvironment):
    """Asks again, with or without the history."""

    second: Any = None

    async def run(self, job: Job) -> float | None:
        question = {"role": "user", "content": job.prompt}
        first = await self.ask([question])
        await self.ask(self.second(question, first))
        return None


async def test_a_conversation_that_is_extended_stays_one_part() -> None:
    class Extended(Twice):
        def second(self, question: Any, first: Answer) -> Any:
            return [question, first.to_message(), {"role": "user", "content": "sure?"}]

    engine = Engine("  3 ", "yes")
    sample, _ = await run(Extended, engine)

    assert sample.parts == []
    assert "assistant\n  3 <|im_end|>\n<|im_start|>user\nsure?<|im_end|>" in engine.prompts[1]


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"role": "user", "content": JOB.prompt}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": "other"}, {"role": "assistant", "content": "3"}],
    ],
)
async def test_a_conversation_that_is_rewritten_begins_a_part(history: list[Any]) -> None:
    class Rewritten(Twice):
        def second(self, question: Any, first: Answer) -> Any:
            return [*history, {"role": "user", "content": "sure?"}]

    engine = Engine("3", "yes")
    sample, _ = await run(Rewritten, engine)

    assert len(sample.parts) == 1
    assert TOKENIZER.decode(sample.tokens[sample.parts[0] :]) == engine.prompts[1] + "yes<|im_end|>"
    assert sample.generated[sample.parts[0]] == 0


async def test_other_tools_begin_a_part() -> None:
    class Armed(ConversationEnvironment):
        async def run(self, job: Job) -> float | None:
            question = {"role": "user", "content": "a"}
            first = await self.ask([question])
            await self.ask([question, first.to_message(), question], [schema_of(add)])
            return None

    sample, _ = await run(Armed, Engine("b", "c"))

    assert len(sample.parts) == 1


async def test_reasoning_that_a_template_removes_begins_a_part() -> None:
    class Extended(Twice):
        def second(self, question: Any, first: Answer) -> Any:
            return [question, first.to_message(), {"role": "user", "content": "sure?"}]

    engine = Engine("<think>\nhm\n</think>\n\n3", "yes")
    sample, _ = await run(Extended, engine, tokenizer=make_tokenizer(THINKING))

    assert len(sample.parts) == 1
    assert "hm" not in engine.prompts[1]


async def test_a_program_that_asks_on_is_refused_until_it_ends() -> None:
    refused = []

    class Endless(ConversationEnvironment):
        async def run(self, job: Job) -> float | None:
            while True:
                try:
                    await self.ask([{"role": "user", "content": "again"}])
                except ConversationFull as exc:
                    refused.append(exc)
                    if len(refused) == 2:
                        return 0.5

    sample, _ = await run(Endless, Engine("a", "b"), settings=Settings(max_turns=2))

    assert (sample.reward, sample.num_turns, sample.status) == (0.5, 2, "truncated")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: None, "ended without calling ask"),
    ],
)
async def test_a_program_that_fails_fails_the_sample(code: Any, error: str) -> None:
    class Failing(ConversationEnvironment):
        async def run(self, job: Job) -> float | None:
            code()
            return None

    with pytest.raises(EnvironmentRaised, match=error):
        await run(Failing, Engine())


async def test_a_program_ends_with_its_environment() -> None:
    ended = asyncio.Event()

    class Patient(ConversationEnvironment):
        async def run(self, job: Job) -> float | None:
            try:
                await self.ask([{"role": "user", "content": "a"}])
                await asyncio.Event().wait()
            finally:
                ended.set()
            return None

    environment = Patient(ModelChat(Settings(), Engine(), TOKENIZER))  # type: ignore[arg-type]
    await environment.reset(JOB)
    await environment.close()
    assert ended.is_set()

    ended.clear()
    await environment.reset(JOB)
    await environment.reset(JOB)
    assert ended.is_set(), "a sample that starts over has one program"
    await environment.close()


async def test_a_model_without_a_chat_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        Calculator(ModelChat(Settings(), Engine(), make_tokenizer(None)))  # type: ignore[arg-type]
