"""Requests of both APIs: what cannot be honoured is refused, and what the run decides is ignored."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.workers.agents.gateway.anthropic_api import Messages
from penstock.workers.agents.gateway.openai_api import Chat, Completions
from penstock.workers.agents.gateway.turns import ApiError, Format, Turn, TurnRequest

USER = {"role": "user", "content": "Hi?"}
CHAT = {"messages": [USER]}
COMPLETION = {"prompt": "Once"}
MESSAGES = {"messages": [USER], "max_tokens": 9}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
        {"response_format": "text"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"parallel_tool_calls": False},
        {"top_logprobs": 2, "logprobs": True},
        {"modalities": ["text", "audio"]},
        {"functions": [{"name": "f"}]},
        {"guided_json": {"type": "object"}},
        {"regex": "a|b"},
        {"structured_outputs": {"choice": ["a"]}},
        {"continue_final_message": True},
        {"prompt_token_ids": [1]},
        {"stream": 1},
        {"stream_options": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_completion_tokens": True},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"stop": [3]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": {}},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]},
    ],
)
def test_what_a_chat_cannot_honour_is_400(more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        Chat().read(CHAT | more)

    assert caught.value.status == 400


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [1, 2]},
        {"prompt": ["a", "b"]},
        {"prompt": None},
        {"echo": True},
        {"best_of": 2},
        {"suffix": "x"},
        {"logprobs": 1},
        {"n": 2},
    ],
)
def test_what_a_completion_cannot_honour_is_400(more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        Completions().read(COMPLETION | more)

    assert caught.value.status == 400


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": "auto"},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"mcp_servers": [{}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]},
        {"system": [{"type": "image"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "x"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
    ],
)
def test_what_messages_cannot_honour_is_400(more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        Messages().read(MESSAGES | more)

    assert caught.value.status == 400


@pytest.mark.parametrize(("api", "body"), [(Chat(), CHAT), (Completions(), COMPLETION), (Messages(), MESSAGES)])
def test_the_run_decides_sampling_and_unknown_parameters_are_ignored(api: Format, body: dict[str, Any]) -> None:
    more = {
        "model": "m", "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
        "ignore_eos": True, "min_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}, "seed": 1,
        "return_token_ids": True, "skip_special_tokens": False, "thinking": {"type": "disabled"}, "new" * 99: 1,
    }  # fmt: skip

    asked = api.read(body | more)

    assert sorted(asked.ignored) == sorted(name[:64] for name in more)
    assert replace(asked, ignored=()) == api.read(body)


def test_a_required_call_is_left_to_the_policy() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    mine = {"name": "f", "input_schema": {}}

    for asked in (
        Chat().read(CHAT | {"tools": [tool], "tool_choice": "required"}),
        Messages().read(MESSAGES | {"tools": [mine], "tool_choice": {"type": "any"}}),
    ):
        assert asked.tools == [tool]
        assert "tool_choice" in asked.ignored[0]


def test_null_is_as_good_as_absent() -> None:
    names = ("n", "tools", "stop", "stream", "stream_options", "logprobs", "tool_choice", "functions", "max_tokens")

    assert Chat().read(CHAT | dict.fromkeys(names)) == TurnRequest(messages=[USER])


def test_no_calls_are_wanted_if_the_choice_is_none() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    mine = {"name": "f", "input_schema": {}}

    assert Chat().read(CHAT | {"tools": [tool], "tool_choice": "none"}).tools == []
    assert Chat().read(CHAT | {"tools": [tool], "tool_choice": "auto"}).tools == [tool]
    assert Messages().read(MESSAGES | {"tools": [mine], "tool_choice": {"type": "none"}}).tools == []


def test_the_newer_limit_of_tokens_holds() -> None:
    assert Chat().read(CHAT | {"max_tokens": 5, "max_completion_tokens": 7}).max_tokens == 7


def test_results_of_tools_keep_their_order_between_texts() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "d"},
    ]

    assert Messages().read(MESSAGES | {"messages": [{"role": "user", "content": blocks}]}).messages == [
        {"role": "user", "content": "ab"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "d"},
    ]


def test_an_answer_without_text_has_a_block_and_one_with_bad_arguments_an_object() -> None:
    request = TurnRequest()
    empty = Messages().answer(Turn(finish_reason="length"), request, "m")
    bad = Turn(finish_reason="tool_calls", tool_calls=[{"id": "c", "name": "f", "arguments": "[1"}])

    assert empty["content"] == [{"type": "text", "text": ""}]
    assert empty["stop_reason"] == "max_tokens"
    assert Messages().answer(bad, request, "m")["content"][0]["input"] == {"arguments": "[1"}


def test_the_logprobs_of_a_stream_are_those_of_its_answer() -> None:
    turn = Turn(finish_reason="stop", content="x", tokens=[1, 2], logprobs=[-1.0, -2.0])
    request = TurnRequest(logprobs=True)
    chunks = [json.loads(event[6:]) for event in list(Chat().events(turn, request, "m"))[:-1]]

    found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert found == [Chat().answer(turn, request, "m")["choices"][0]["logprobs"]]
