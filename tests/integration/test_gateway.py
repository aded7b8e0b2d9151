"""Official clients at a gateway: turns, streams, tools, errors and retries, with workers that are played."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import redis
from aiohttp import web

from penstock.config import Config
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import GateClosed
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.workers.agents.gateway import routing, server
from tests.integration.docs_blocks import blocks
from tests.integration.gateway_parts import (
    CALL,
    CLIENT,
    JOB,
    TOKEN,
    PlayedWorker,
    gateway,
    gateway_config,
    key_of,
    turn,
)

MODEL = "any"
ASK: list[Any] = [{"role": "user", "content": "Hi?"}]
TOOL: Any = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
ANTHROPIC_TOOL: Any = {"name": "search", "input_schema": {"type": "object"}}


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return gateway_config(redis_server.url, keys, tmp_path)


@pytest.fixture
async def worker(client: redis.Redis, keys: Keys) -> AsyncIterator[PlayedWorker]:
    async with PlayedWorker(client, keys, "w.1").up() as played:
        played.hold()
        yield played


@pytest.fixture
async def url(config: Config, worker: PlayedWorker) -> AsyncIterator[str]:
    async with gateway(config) as url:
        yield url


@pytest.fixture
async def agent(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key_of(), max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key_of(), max_retries=0) as client:
        yield client


async def post(url: str, token: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Return status, JSON and headers of a POST."""
    headers = {"Authorization": f"Bearer {token}"} | headers
    async with aiohttp.ClientSession() as session, session.post(url, json=body or {}, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def test_a_turn_by_the_client_of_openai(agent: openai.AsyncOpenAI, worker: PlayedWorker) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "none"},
    ]  # fmt: skip
    asking = asyncio.create_task(
        agent.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], max_tokens=9, stop="END", temperature=0.1, logprobs=True
        )
    )
    asked = await worker.asked.get()
    asked.answer(turn(content=None, reasoning="Search.", tool_calls=[CALL], finish_reason="tool_calls"))
    answer = await asking

    assert asked.path == "/turn"
    assert asked.body == {
        "key": key_of(),
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}, *messages[2:]],
        "tools": [TOOL],
        "max_tokens": 9,
        "stop": ["END"],
        "is_retry": False,
    }
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.model_extra == {"reasoning_content": "Search."}
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].to_dict() == {
        "id": "call_1", "type": "function", "function": {"name": "search", "arguments": CALL["arguments"]}
    }  # fmt: skip
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(one.token, one.logprob) for one in choice.logprobs.content] == [
        ("token_id:21", -0.5), ("token_id:22", -0.25), ("token_id:23", -1.0)
    ]  # fmt: skip
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 3, 14)
    assert answer.system_fingerprint == "version-5"


async def test_a_streamed_turn_by_the_client_of_openai(
    agent: openai.AsyncOpenAI, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.001)
    asking = asyncio.create_task(
        agent.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
    )
    asked = await worker.asked.get()
    chunks = await asking  # its head is sent before the turn is complete, and pings follow
    asked.answer(turn(reasoning="Hm.", tool_calls=[CALL], finish_reason="tool_calls"))
    found = [chunk async for chunk in chunks]

    deltas = [chunk.choices[0].delta for chunk in found[:-1]]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas if delta.content] == ["Hello."]
    assert deltas[1].model_extra == {"reasoning_content": "Hm."}
    assert deltas[3].tool_calls is not None
    assert deltas[3].tool_calls[0].function is not None
    assert deltas[3].tool_calls[0].function.arguments == CALL["arguments"]
    assert found[-2].choices[0].finish_reason == "tool_calls"
    assert found[-1].usage is not None
    assert found[-1].usage.total_tokens == 14


async def test_a_completion_of_a_text(agent: openai.AsyncOpenAI, worker: PlayedWorker) -> None:
    worker.reply = lambda path, body: web.json_response(turn(content=f"{body['prompt']}!"))

    answer = await agent.completions.create(model=MODEL, prompt="Once", logprobs=0)
    streamed = [chunk async for chunk in await agent.completions.create(model=MODEL, prompt="Twice", stream=True)]

    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Once!", "stop")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5, -0.25, -1.0]
    assert [chunk.choices[0].text for chunk in streamed] == ["Twice!"]


async def test_models_are_listed_for_both_clients(agent: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    assert [one.id async for one in agent.models.list()] == ["policy"]
    assert [one.id async for one in claude.models.list()] == ["policy"]


async def test_a_turn_by_the_client_of_anthropic(claude: anthropic.AsyncAnthropic, worker: PlayedWorker) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "7-0-0"},
            {"type": "text", "text": "I search."},
            {"type": "tool_use", "id": "call_0", "name": "search", "input": {"query": "ä"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "none"}]},
            {"type": "text", "text": "Go on."}]},
    ]  # fmt: skip
    asking = asyncio.create_task(
        claude.messages.create(
            model=MODEL, max_tokens=9, messages=messages, system="Be brief.", tools=[ANTHROPIC_TOOL],
            stop_sequences=["END"], temperature=0.1,
        )
    )  # fmt: skip
    asked = await worker.asked.get()
    asked.answer(turn(reasoning="Search.", tool_calls=[CALL], finish_reason="tool_calls"))
    answer = await asking

    called = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": '{"query": "ä"}'}}
    assert asked.body == {
        "key": key_of(),
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi?"},
            {"role": "assistant", "content": "I search.", "reasoning_content": "Hm.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call_0", "content": "none"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [TOOL],
        "max_tokens": 9,
        "stop": ["END"],
        "is_retry": False,
    }
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": "Search.", "signature": "7-0-1"},
        {"type": "text", "text": "Hello."},
        {"type": "tool_use", "id": "call_1", "name": "search", "input": {"query": "penstock", "most": 3}},
    ]
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 3)


async def test_a_streamed_turn_by_the_client_of_anthropic(
    claude: anthropic.AsyncAnthropic, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.001)
    async with asyncio.TaskGroup() as tasks:

        async def stream() -> Any:
            async with claude.messages.stream(model=MODEL, max_tokens=9, messages=ASK) as events:
                return await events.get_final_message()

        asking = tasks.create_task(stream())
        asked = await worker.asked.get()
        asked.answer(turn(reasoning="Search.", tool_calls=[CALL], finish_reason="tool_calls"))

    answer = asking.result()
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert (answer.content[0].thinking, answer.content[0].signature) == ("Search.", "7-0-1")
    assert answer.content[2].input == {"query": "penstock", "most": 3}
    assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", 3)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (409, openai.ConflictError),
        (410, openai.APIStatusError),
        (413, openai.APIStatusError),
        (500, openai.InternalServerError),
        (401, openai.InternalServerError),
    ],
)
async def test_errors_of_a_worker_reach_the_client_of_openai(
    url: str, worker: PlayedWorker, status: int, error: type[Exception]
) -> None:
    asked = []

    def refuse(path: str, body: dict[str, Any]) -> web.Response:
        asked.append(path)
        return web.json_response({"error": "a reason"}, status=status)

    worker.reply = refuse
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key_of(), max_retries=1) as agent:
        with pytest.raises(error, match="a reason" if status != 401 else "PENSTOCK_SERVING__TOKEN"):
            await agent.chat.completions.create(model=MODEL, messages=ASK)

    # Only a failure of the worker is worth another request: the client repeats a 409 unless it is told not to.
    assert len(asked) == (2 if status in (500, 401) else 1)


@pytest.mark.parametrize(
    ("status", "error"), [(400, anthropic.BadRequestError), (409, anthropic.ConflictError), (413, anthropic.APIError)]
)
async def test_errors_of_a_worker_reach_the_client_of_anthropic(
    claude: anthropic.AsyncAnthropic, worker: PlayedWorker, status: int, error: type[Exception]
) -> None:
    worker.reply = lambda path, body: web.json_response({"error": "a reason"}, status=status)

    with pytest.raises(error, match="a reason"):
        await claude.messages.create(model=MODEL, max_tokens=9, messages=ASK)


@pytest.mark.parametrize(
    ("path", "ping"), [("/v1/chat/completions", b": waiting for the turn\n"), ("/v1/messages", b"event: ping\n")]
)
async def test_a_stream_is_kept_open_by_pings_until_its_turn_is_complete(
    url: str, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch, path: str, ping: bytes
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.001)
    body = {"messages": ASK, "max_tokens": 9, "stream": True}
    headers = {"Authorization": f"Bearer {key_of()}"}
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=headers) as response:
        found = [await response.content.readline() for _ in range(9)]
        (await worker.asked.get()).answer()
        assert found.count(ping) >= 2
        assert b"Hello." in await response.read()


async def test_an_error_after_the_first_ping_ends_the_stream_with_it(
    agent: openai.AsyncOpenAI,
    claude: anthropic.AsyncAnthropic,
    worker: PlayedWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.0)
    chunks = await agent.chat.completions.create(model=MODEL, messages=ASK, stream=True)
    (await worker.asked.get()).answer({"error": "a reason"}, status=410)
    with pytest.raises(openai.APIError, match="a reason"):
        [chunk async for chunk in chunks]

    events = await claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, stream=True)
    (await worker.asked.get()).answer({"error": "a reason"}, status=410)
    with pytest.raises(anthropic.APIStatusError, match="a reason"):
        [event async for event in events]


async def test_an_error_before_the_first_ping_has_a_status(agent: openai.AsyncOpenAI, worker: PlayedWorker) -> None:
    worker.reply = lambda path, body: web.json_response({"error": "a reason"}, status=409)

    with pytest.raises(openai.ConflictError, match="a reason"):
        await agent.chat.completions.create(model=MODEL, messages=ASK, stream=True)


async def test_a_wrong_key_is_refused_by_each_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=CLIENT) as agent:
        with pytest.raises(openai.AuthenticationError, match="POST /v1/episodes"):
            await agent.chat.completions.create(model=MODEL, messages=ASK)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-x") as claude:
        with pytest.raises(anthropic.AuthenticationError, match="POST /v1/episodes"):
            await claude.messages.create(model=MODEL, max_tokens=9, messages=ASK)


@pytest.mark.parametrize(("header", "is_retry"), [("0", False), ("2", True), ("x", True), ("", True)])
async def test_a_repeat_of_the_client_is_passed_on(url: str, worker: PlayedWorker, header: str, is_retry: bool) -> None:
    asked: list[bool] = []

    def answer(path: str, body: dict[str, Any]) -> web.Response:
        asked.append(body["is_retry"])
        return web.json_response(turn())

    worker.reply = answer
    headers = {"x-stainless-retry-count": header} if header else {}
    status, _, _ = await post(f"{url}/v1/chat/completions", key_of(), {"messages": ASK}, **headers)

    assert (status, asked) == (200, [is_retry])


async def test_another_worker_continues_a_turn_after_the_first_one_dies(
    agent: openai.AsyncOpenAI, worker: PlayedWorker, client: redis.Redis, keys: Keys
) -> None:
    asking = asyncio.create_task(agent.chat.completions.create(model=MODEL, messages=ASK))
    first = await worker.asked.get()
    client.hset(keys.group(JOB), mapping={"st": "queued", "own": ""})
    await worker.die()
    async with PlayedWorker(client, keys, "w.2").up() as other:
        other.hold()
        second = await other.asked.get()
        second.answer(turn(content="Continued."))
        answer = await asking

    assert answer.choices[0].message.content == "Continued."
    assert (first.body["is_retry"], second.body["is_retry"]) == (False, True)
    assert {**first.body, "is_retry": True} == second.body


async def test_a_silent_worker_that_lost_the_job_is_left(
    agent: openai.AsyncOpenAI,
    worker: PlayedWorker,
    client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "CHECK_S", 0.01)
    asking = asyncio.create_task(agent.chat.completions.create(model=MODEL, messages=ASK))
    await worker.asked.get()  # it never answers, as a machine that lost its power
    async with PlayedWorker(client, keys, "w.2").up() as other:
        other.hold()
        (await other.asked.get()).answer()

        assert (await asking).choices[0].message.content == "Hello."


@pytest.mark.parametrize("status", [404, 503])
async def test_a_worker_that_hands_the_job_back_is_left(
    agent: openai.AsyncOpenAI, worker: PlayedWorker, client: redis.Redis, keys: Keys, status: int
) -> None:
    asking = asyncio.create_task(agent.chat.completions.create(model=MODEL, messages=ASK))
    asked = await worker.asked.get()
    async with PlayedWorker(client, keys, "w.2").up() as other:
        other.hold()
        asked.answer({"error": "not mine"}, status=status)
        (await other.asked.get()).answer()

        assert (await asking).choices[0].message.content == "Hello."


async def test_a_turn_without_a_worker_ends_after_a_limit(
    config: Config, worker: PlayedWorker, client: redis.Redis, keys: Keys
) -> None:
    client.hset(keys.group(JOB), mapping={"st": "queued", "own": ""})
    short = config.model_copy(update={"agents": config.agents.model_copy(update={"idle_s": 0.1})})
    async with gateway(short) as url:
        status, answer, headers = await post(f"{url}/v1/chat/completions", key_of(), {"messages": ASK})

    assert status == 503
    assert f"job {JOB} is queued and has no worker" in answer["error"]["message"]
    assert headers["Retry-After"] == "2"


async def test_a_client_that_leaves_ends_its_request_at_the_worker(url: str, worker: PlayedWorker) -> None:
    asking = asyncio.create_task(post(f"{url}/v1/chat/completions", key_of(), {"messages": ASK}))
    asked = await worker.asked.get()
    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asked.reply


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({}, "ended, its samples were used or discarded"),
        ({"st": "ready"}, "ended, its samples were used or discarded"),
        ({"st": "retiring"}, "ended, its samples were used or discarded"),
        ({"st": "dead"}, "dead letter"),
        ({"st": "leased", "own": "w.1", "s:0": "token"}, "this episode ended"),
    ],
)
async def test_a_turn_of_an_episode_that_is_over_is_refused(
    url: str, client: redis.Redis, keys: Keys, group: dict[str, str], message: str
) -> None:
    client.delete(keys.group(JOB))
    if group:
        client.hset(keys.group(JOB), mapping=group)

    status, answer, _ = await post(f"{url}/v1/chat/completions", key_of(), {"messages": ASK})

    assert status == 410
    assert message in answer["error"]["message"]


async def test_an_episode_is_opened_and_finished(url: str, worker: PlayedWorker) -> None:
    opened = {"key": key_of(), "job": JOB, "k": 0, "dataset": "d", "lane": "train", "prompt": "p", "label": "l",
              "metadata": {"a": 1}}  # fmt: skip
    asked: list[Any] = []

    def answer(path: str, body: dict[str, Any]) -> web.Response:
        asked.append((path, body))
        return web.json_response(opened if path == "/open" else {})

    worker.reply = answer
    status, episode, _ = await post(f"{url}/v1/episodes", CLIENT, {"wait_s": 5})
    assert status == 200
    assert episode == {**opened, "base_url": f"{url}/v1"}

    assert (await post(f"{url}/v1/episodes/finish", episode["key"], {"reward": 0.5, "info": {"b": 2}}))[:2] == (200, {})
    assert (await post(f"{url}/v1/episodes/finish", episode["key"]))[:2] == (200, {})
    assert (await post(f"{url}/v1/episodes/fail", episode["key"], {"error": "no tool"}))[:2] == (200, {})
    assert asked == [
        ("/open", {}),
        ("/finish", {"key": key_of(), "reward": 0.5, "info": {"b": 2}}),
        ("/finish", {"key": key_of(), "reward": None, "info": {}}),
        ("/fail", {"key": key_of(), "error": "no tool"}),
    ]


async def test_a_committed_episode_is_finished_again(url: str, client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.group(JOB), mapping={"st": "ready", "s:0": "token"})

    assert (await post(f"{url}/v1/episodes/finish", key_of()))[:2] == (200, {})
    assert (await post(f"{url}/v1/episodes/finish", key_of(k=1)))[0] == 410


async def test_a_finish_that_the_worker_refuses_as_it_has_ended_is_answered(
    url: str, worker: PlayedWorker, client: redis.Redis, keys: Keys
) -> None:
    def end(path: str, body: dict[str, Any]) -> web.Response:
        client.hset(keys.group(JOB), "s:0", "token")
        return web.json_response({"error": "ended"}, status=410)

    worker.reply = end

    assert (await post(f"{url}/v1/episodes/finish", key_of()))[:2] == (200, {})


async def test_no_episode_is_429_with_the_reason(
    url: str, worker: PlayedWorker, client: redis.Redis, keys: Keys
) -> None:
    worker.reply = lambda path, body: web.Response(status=204)
    status, answer, headers = await post(f"{url}/v1/episodes", CLIENT)
    assert (status, headers["Retry-After"]) == (429, "2")
    assert "every leased episode has an agent" in answer["error"]["message"]

    PublishedWaiting(client, keys, "producer").blocked_on(GateClosed("actor", 4, 4), since_s=1.0)
    answer = (await post(f"{url}/v1/episodes", CLIENT))[1]
    assert "the producer waits for trainer:actor to publish (blocked by the staleness" in answer["error"]["message"]


async def test_no_worker_of_agents_is_429_with_the_reason(url: str, worker: PlayedWorker, config: Config) -> None:
    worker.show(agents_url="")
    async with gateway(config) as fresh:
        status, answer, _ = await post(f"{fresh}/v1/episodes", CLIENT)

    assert status == 429
    assert "no worker for agent episodes is ready" in answer["error"]["message"]


async def test_a_draining_worker_is_asked_for_an_episode_after_others(
    url: str, worker: PlayedWorker, client: redis.Redis, keys: Keys
) -> None:
    worker.show(state="draining")
    worker.reply = lambda path, body: web.json_response({"key": key_of(nonce="draining")})
    async with PlayedWorker(client, keys, "w.2").up() as other:
        opening = asyncio.create_task(post(f"{url}/v1/episodes", CLIENT))
        (await other.asked.get()).answer({"key": key_of(nonce="serving")})
        assert (await opening)[1]["key"] == key_of(nonce="serving")
        opening = asyncio.create_task(post(f"{url}/v1/episodes", CLIENT))
        (await other.asked.get()).reply.set_result(web.Response(status=204))
        assert (await opening)[1]["key"] == key_of(nonce="draining")


async def test_a_client_waits_for_an_episode(url: str, worker: PlayedWorker) -> None:
    opening = asyncio.create_task(post(f"{url}/v1/episodes", CLIENT, {"wait_s": 60}))
    (await worker.asked.get()).reply.set_result(web.Response(status=204))
    (await worker.asked.get()).answer({"key": key_of()})

    assert (await opening)[0] == 200


async def test_an_episode_whose_client_left_is_for_the_next_one(url: str, worker: PlayedWorker) -> None:
    leaving = asyncio.create_task(post(f"{url}/v1/episodes", CLIENT))
    asked = await worker.asked.get()
    leaving.cancel()
    next_ = asyncio.create_task(post(f"{url}/v1/episodes", CLIENT, {"wait_s": 60}))
    second = await worker.asked.get()  # the first client's round goes on beside this one
    asked.answer({"key": key_of(nonce="first")})
    second.reply.set_result(web.Response(status=204))

    assert (await next_)[1]["key"] == key_of(nonce="first")


@pytest.mark.parametrize("token", ["", TOKEN, key_of(), CLIENT + "x"])
async def test_only_clients_open_episodes(url: str, token: str) -> None:
    status, answer, headers = await post(f"{url}/v1/episodes", token)

    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "agents.clients" in answer["error"]["message"]


async def test_the_run_s_token_opens_episodes_if_there_are_no_clients(
    redis_server: RedisServer, keys: Keys, tmp_path: Path, worker: PlayedWorker
) -> None:
    worker.reply = lambda path, body: web.json_response({"key": key_of()})
    async with gateway(gateway_config(redis_server.url, keys, tmp_path, clients={})) as url:
        assert (await post(f"{url}/v1/episodes", TOKEN))[0] == 200


async def test_a_wrong_address_of_a_worker_gets_no_token(url: str, worker: PlayedWorker, config: Config) -> None:
    worker.show(agents_url=worker.url + "@127.0.0.1:1/")
    async with gateway(config) as fresh:
        assert (await post(f"{fresh}/v1/episodes", CLIENT))[0] == 429

    assert worker.asked.empty()


async def test_the_example_of_the_page_runs_an_episode(
    url: str, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {"key": key_of(), "prompt": "Hi?", "label": "Hello"}
    ends: list[Any] = []

    def reply(path: str, body: dict[str, Any]) -> web.Response:
        if path == "/finish":
            ends.append(body["reward"])
        return web.json_response({"/open": opened, "/turn": turn()}.get(path, {}))

    worker.reply = reply
    (example,) = [one for one in blocks() if one.key.startswith("docs/agents.md: # agent.py")]
    monkeypatch.setenv("TOKEN", CLIENT)
    code = compile(example.text.replace("http://127.0.0.1:8900", url), "agent.py", "exec")
    await asyncio.to_thread(exec, code, {})

    assert ends == [1.0]


async def test_integers_of_any_length_pass(url: str, claude: anthropic.AsyncAnthropic, worker: PlayedWorker) -> None:
    arguments = json.dumps({"n": 10**40})
    worker.reply = lambda path, body: web.json_response(turn(tool_calls=[{**CALL, "arguments": arguments}]))

    answer: Any = await claude.messages.create(model=MODEL, max_tokens=9, messages=ASK)

    assert answer.content[-1].input == {"n": 10**40}
