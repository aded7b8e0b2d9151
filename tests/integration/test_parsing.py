"""Answers parsed into content, reasoning and calls of tools by a real SGLang, and by fakes that fail."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.config.fleet import MemberConfig, RouterConfig
from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.protocol.presence import EngineState
from penstock.workers.agents.parsing import Answer, AnswerParser
from penstock.workers.router.engine import RoutedEngine
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.engine import SglangEngine
from tests.chat_templates import CHATML, make_tokenizer
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import until

engined = pytest.mark.engine
TOKENIZER = make_tokenizer(CHATML)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("add", "sub")
]


def call(name: str = "add", **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


async def parsed(engine: SglangClient, text: str, calls: str | None = "qwen25", reasoning: str | None = None) -> Answer:
    parser = AnswerParser(engine, TOKENIZER, calls, reasoning)
    return await parser.parse(TOKENIZER.encode(text), TOOLS, "a/0/0/0:1")


def made(answer: Answer) -> list[tuple[str, Any]]:
    return [(one.name, json.loads(one.arguments)) for one in answer.tool_calls]


@engined
async def test_parallel_calls_are_parsed(engine: SglangEngine) -> None:
    answer = await parsed(engine, f"Both.\n{call(a=1)}\n{call('sub', a='é')}<|im_end|>")

    assert answer.content == "Both."
    assert made(answer) == [("add", {"a": 1}), ("sub", {"a": "é"})]


@engined
async def test_reasoning_is_separated_before_calls_are_parsed(engine: SglangEngine) -> None:
    """The call in the reasoning is not made."""
    answer = await parsed(engine, f"<think>\n{call(a=0)}\n</think>\n\nNow:\n{call(a=1)}", reasoning="qwen3")

    assert "<tool_call>" in answer.reasoning
    assert answer.content == "Now:"
    assert made(answer) == [("add", {"a": 1})]


@engined
@pytest.mark.parametrize("wrong", [call("mul", a=1), "<tool_call>\n{add\n</tool_call>", "<tool_call>\n{", "plain"])
async def test_a_call_that_cannot_be_parsed_stays_text(engine: SglangEngine, wrong: str) -> None:
    """SGLang would return only the text before it."""
    assert await parsed(engine, f"So: {wrong}<|im_end|>") == Answer(f"So: {wrong}")


@engined
async def test_parsers_see_special_tokens(engine: SglangEngine) -> None:
    """Those of Mistral's models begin calls with one."""
    answer = await parsed(engine, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>', calls="mistral")

    assert (answer.content, made(answer)) == ("", [("add", {"a": 1})])


@engined
async def test_the_parsers_of_the_configuration_must_exist(engine: SglangEngine) -> None:
    await AnswerParser(engine, TOKENIZER, "qwen25", "qwen3").verify()
    await AnswerParser(engine, TOKENIZER, None, None).verify()

    with pytest.raises(ConfigError, match=r"tool_call_parser 'qwen26' .* must be parsers of the engine's SGLang"):
        await AnswerParser(engine, TOKENIZER, "qwen26", None).verify()
    with pytest.raises(ConfigError, match=r"agents\.reasoning_parser 'qwen4'"):
        await AnswerParser(engine, TOKENIZER, None, "qwen4").verify()


@pytest.fixture
async def faked(fake: FakeEngine, model_config: ModelConfig, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    """An engine whose server is a fake."""
    engine = SglangEngine(EngineConfig(url=fake.url), model_config, name="test", log_dir=tmp_path)
    await engine.start()
    yield engine
    await engine.stop()


async def test_ids_of_calls_depend_on_the_turn_alone(faked: SglangEngine) -> None:
    parser = AnswerParser(faked, TOKENIZER, "qwen25", None)
    ids = TOKENIZER.encode(call(a=1) + call(a=1))
    first, again, other = [await parser.parse(ids, TOOLS, name) for name in ("a/0/0/0:1", "a/0/0/0:1", "a/0/0/0:2")]

    names = [one.id for one in first.tool_calls + other.tool_calls]
    assert first == again
    assert len(set(names)) == 4
    assert all(len(name) == 9 and name.isalnum() for name in names)


async def test_an_error_of_a_parser_leaves_text_and_a_lost_engine_is_an_error(
    faked: SglangEngine, fake: FakeEngine
) -> None:
    assert await parsed(faked, call(a=1), calls="other") == Answer(call(a=1))

    fake.is_away = True
    with pytest.raises(EngineDied):
        await parsed(faked, call(a=1))
    with pytest.raises(EngineDied):
        await parsed(faked, call(a=1), calls=None, reasoning="qwen3")
    with pytest.raises(EngineDied):
        await AnswerParser(faked, TOKENIZER, "qwen25", None).verify()


async def test_a_stop_id_is_not_parsed_and_nothing_is_without_tools(
    faked: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked.eos_token_ids = frozenset(TOKENIZER.encode("</s>"))
    parse = AsyncMock(return_value=("3", []))
    monkeypatch.setattr(faked, "parse_calls", parse)
    parser = AnswerParser(faked, TOKENIZER, "qwen25", None)

    assert await parser.parse(TOKENIZER.encode("3</s>"), None, "a") == Answer("3")
    parse.assert_not_called()
    assert await parser.parse(TOKENIZER.encode("3</s>"), TOOLS, "a") == Answer("3")
    parse.assert_awaited_once_with("3", TOOLS, "qwen25")


async def test_a_stop_text_is_not_part_of_an_answer(faked: SglangEngine) -> None:
    parser = AnswerParser(faked, TOKENIZER, "other", None)
    assert await parser.parse(TOKENIZER.encode("3;4;"), TOOLS, "a", ["x", ";"]) == Answer("3")


@pytest.mark.parametrize("answer", [[], {}, {"calls": [{}], "normal_text": ""}, {"calls": [], "normal_text": 1}])
async def test_a_malformed_answer_of_a_parser_is_an_error(
    faked: SglangEngine, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(faked, "call", AsyncMock(return_value=answer))

    with pytest.raises(EngineError, match="malformed answer to"):
        await faked.parse_calls("a", TOOLS, "qwen25")
    with pytest.raises(EngineError, match="malformed answer to"):
        await faked.separate_reasoning("a", "qwen3")


@engined
async def test_any_server_behind_a_router_parses(model_config: ModelConfig, tmp_path: Path) -> None:
    """The next one if one is lost; while none serves the text waits."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine().up()) for _ in range(2)]
        router = RouterConfig(engines=[MemberConfig(url=fake.url) for fake in fakes])
        config = EngineConfig(python=cpu_engine().python, router=router, health_interval_s=0.1)
        engine = RoutedEngine(config, model_config, name="test", log_dir=tmp_path)
        await engine.start()
        stack.push_async_callback(engine.stop)
        await until(lambda: {one.state for one in engine.describe()} == {EngineState.SERVING})
        for fake in fakes:
            fake.controls.clear()

        assert made(await parsed(engine, call(a=1))) == [("add", {"a": 1})]
        assert [fake.controls for fake in fakes] == [["/parse_function_call"], []]
        fakes[0].is_away = True
        assert made(await parsed(engine, call(a=2))) == [("add", {"a": 2})]
        fakes[1].is_away = True
        waiting = asyncio.create_task(parsed(engine, call(a=3)))
        await until(lambda: not engine.routable.is_set())
        assert not waiting.done()
        fakes[1].is_away = False
        assert made(await waiting) == [("add", {"a": 3})]

        fakes[1].is_away = True
        stopped = asyncio.create_task(parsed(engine, call(a=4)))
        await until(lambda: not engine.routable.is_set())
    with pytest.raises(EngineDied, match="was stopped during"):
        await stopped
