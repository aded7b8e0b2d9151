"""A gateway under hostile clients: each is refused in its own time, and others are served meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from aiohttp import web

from penstock.config import Config
from penstock.protocol.episode_key import make_key
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.workers.agents.gateway import server
from tests.integration.gateway_parts import JOB, TOKEN, PlayedWorker, gateway, gateway_config, key_of, turn

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "Hi?"}]}


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 200_000)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 50)
    return gateway_config(redis_server.url, keys, tmp_path)


@pytest.fixture
async def url(config: Config, client: redis.Redis, keys: Keys) -> AsyncIterator[str]:
    worker = PlayedWorker(client, keys, "w.1", reply=lambda path, body: web.json_response(turn()))
    async with worker.up(), gateway(config) as url:
        worker.hold()
        yield url


async def send(url: str, data: Any, key: str | None = None, path: str = CHAT, **headers: str) -> tuple[int, Any]:
    """Return status and body of a POST of raw data."""
    headers = {"Authorization": f"Bearer {key_of() if key is None else key}"} | headers
    async with aiohttp.ClientSession() as session, session.post(url + path, data=data, headers=headers) as response:
        return response.status, json.loads(await response.read() or b"null")


async def is_served(url: str) -> bool:
    return (await send(url, json.dumps(GOOD)))[0] == 200


async def connected(url: str, text: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(text)
    await writer.drain()
    return reader, writer


def head(*more: str, key: str | None = None) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: h", f"Authorization: Bearer {key_of() if key is None else key}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b'{"messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"messages": [{"role": "user", "content": NaN}]}',
        b'{"messages": []}',
        b'{"messages": [3]}',
        b'{"messages": [{"role": "user", "content": {"text": "x"}}]}',
        b'{"messages": [{"role": "robot", "content": "x"}]}',
    ],
)
async def test_a_body_that_is_no_request_is_400(url: str, data: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/messages"):
        status, answer = await send(url, data, path=path)

        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
    assert await is_served(url)


@pytest.mark.parametrize("depth", [300, 1000])
async def test_tools_that_are_nested_too_deeply_are_400(url: str, depth: int) -> None:
    schema = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"name": "f", "parameters": {schema}}}'
    called = f'{{"type": "tool_use", "id": "c", "name": "f", "input": {schema}}}'
    chat = (
        f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{{"type": "function", "function": {tool}}}]}}'
    )
    messages = f'{{"max_tokens": 1, "messages": [{{"role": "assistant", "content": [{called}]}}]}}'

    assert (await send(url, chat))[0] == 400
    # Here it is text in another format, which a worker can be sent unless it is as deep as Python can write.
    assert (await send(url, messages, path="/v1/messages"))[0] == (200 if depth < 500 else 400)


async def test_a_large_body_is_413_before_it_is_read(url: str) -> None:
    reader, writer = await connected(url, head("Content-Length: 1000000000"))

    assert b"413" in await reader.readline()
    writer.close()
    assert await is_served(url)


async def test_a_large_body_without_a_length_is_413(url: str) -> None:
    reader, writer = await connected(url, head("Transfer-Encoding: chunked") + b"ffffff\r\n" + b" " * 300_000)

    assert b"413" in await reader.readline()
    writer.close()
    assert await is_served(url)


async def test_a_compressed_body_is_refused(url: str) -> None:
    assert (await send(url, b"x", **{"Content-Encoding": "gzip"}))[0] == 415


async def test_all_open_bodies_have_a_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_OPEN_BYTES", 150_000)
    reader, writer = await connected(url, head("Content-Length: 150000") + b" " * 149_999)
    async with asyncio.timeout(60):
        while (await send(url, b" " * 100_000))[0] != 503:
            pass  # the first body has not been read yet
    writer.write(b" ")

    assert b"400" in await reader.readline()
    assert await is_served(url)  # both have been given back
    writer.close()


async def test_a_slow_body_is_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.05)
    reader, writer = await connected(url, head("Content-Length: 10") + b"{")

    assert b"408" in await reader.readline()
    writer.close()


@pytest.mark.parametrize("text", [b"", b"POST /v1/ch", b"POST / HTTP/1.1\r\nHost: h\r\nX-Slow: "])
async def test_a_slow_head_is_closed(config: Config, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    async with gateway(config) as url:
        reader, writer = await connected(url, text)

        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "text", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n" + b"a" * 40_000]
)
async def test_what_is_no_http_is_400_or_closed(url: str, text: bytes) -> None:
    reader, writer = await connected(url, text)

    assert (await reader.readline())[9:12] in (b"400", b"")
    writer.close()
    assert await is_served(url)


async def test_silent_connections_keep_no_client_out(url: str) -> None:
    silent = [await connected(url) for _ in range(500)]

    assert await is_served(url)
    for _, writer in silent:
        writer.close()


async def test_a_running_turn_is_not_closed_for_silent_connections(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    worker = PlayedWorker(client, keys, "w.1")
    async with worker.up(), gateway(config) as url:
        worker.hold()
        asking = asyncio.create_task(send(url, json.dumps(GOOD)))
        asked = await worker.asked.get()
        silent = [await connected(url) for _ in range(200)]
        asked.answer()

        assert (await asking)[0] == 200
        for _, writer in silent:
            writer.close()


async def test_one_episode_has_a_limit_of_open_requests(config: Config, client: redis.Redis, keys: Keys) -> None:
    worker = PlayedWorker(client, keys, "w.1")
    async with worker.up(), gateway(config) as url:
        worker.hold()
        running = [asyncio.create_task(send(url, json.dumps(GOOD))) for _ in range(server.MAX_OPEN_REQUESTS)]
        asked = [await worker.asked.get() for _ in running]
        assert (await send(url, json.dumps(GOOD)))[0] == 429
        other = asyncio.create_task(send(url, json.dumps(GOOD), key=key_of(k=1)))
        for one in (*asked, await worker.asked.get()):
            one.answer()

        assert {(await one)[0] for one in (*running, other)} == {200}
        again = asyncio.create_task(send(url, json.dumps(GOOD)))
        (await worker.asked.get()).answer()
        assert (await again)[0] == 200


async def test_a_connection_beyond_the_limit_of_running_turns_is_503(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    worker = PlayedWorker(client, keys, "w.1")
    async with worker.up(), gateway(config) as url:
        worker.hold()
        asking = asyncio.create_task(send(url, json.dumps(GOOD)))
        asked = await worker.asked.get()
        reader, writer = await connected(url)

        assert b"503" in await reader.readline()
        writer.close()
        asked.answer()
        assert (await asking)[0] == 200


@pytest.mark.parametrize(
    "key",
    [
        "",
        "pk-",
        "pk-e30.AAAA",
        "x" * 10_000,
        make_key("another run's token 0123", JOB, 0, 0, "n"),
        key_of()[:-1] + ("A" if key_of()[-1] != "A" else "B"),
        TOKEN,
    ],
)
async def test_a_key_that_this_run_did_not_give_is_401(url: str, key: str) -> None:
    for path in (CHAT, "/v1/messages", "/v1/completions", "/v1/episodes/finish", "/v1/episodes/fail"):
        status, answer = await send(url, json.dumps(GOOD), key=key, path=path)

        assert status == 401
        assert key not in json.dumps(answer) or not key


async def test_a_key_of_another_job_reaches_no_worker(url: str) -> None:
    assert (await send(url, json.dumps(GOOD), key=key_of("other/0/1")))[0] == 410


async def test_unknown_paths_and_methods_are_refused_in_the_format_of_the_api(url: str) -> None:
    assert (await send(url, b"{}", path="/v2"))[1]["error"]["code"] == "not_found"
    assert (await send(url, b"{}", path="/v1/messages/count_tokens"))[1]["type"] == "error"
    async with aiohttp.ClientSession() as session, session.get(url + CHAT) as response:
        assert response.status == 405


async def test_a_header_host_that_is_none_makes_no_address(url: str) -> None:
    status, answer = await send(url, b"{}", key="client-token-0123456789", path="/v1/episodes", Host="a/../b c")

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(body=b"{"),
        web.Response(body=b"[]"),
        web.json_response({}),
        web.json_response(turn(content=3)),
        web.json_response(turn(tokens="x")),
    ],
)
async def test_an_answer_of_a_worker_that_is_none_is_502(
    config: Config, client: redis.Redis, keys: Keys, answer: web.Response
) -> None:
    data = answer.body
    worker = PlayedWorker(client, keys, "w.1", reply=lambda path, body: web.Response(body=data))
    async with worker.up(), gateway(config) as url:
        worker.hold()

        assert (await send(url, json.dumps(GOOD)))[0] == 502


async def test_a_worker_that_redirects_is_not_followed(config: Config, client: redis.Redis, keys: Keys) -> None:
    other = PlayedWorker(client, keys, "other")
    async with other.up():
        worker = PlayedWorker(
            client, keys, "w.1", reply=lambda path, body: web.Response(status=307, headers={"Location": other.url})
        )
        async with worker.up(), gateway(config) as url:
            worker.hold()

            assert (await send(url, json.dumps(GOOD)))[0] == 502
    assert not other.num_requests
