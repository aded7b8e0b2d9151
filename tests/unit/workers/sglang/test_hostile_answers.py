"""Answers of an engine that are at their worst: an error of penstock's own, in bounded time, memory and words."""

import copy
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError, PenstockError
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.server_info import ServerInfo
from penstock.workers.sglang.stream import MAX_OVER, Answer
from tests.unit.workers.sglang.test_engine_answers import answer, engine, read

WORST: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**40, 2**63, 1e308, "", "x" * 100_000, "9" * 5000, "3"),
    *([], {}, [[]], [None], [[1]], {"a": 1}, {"type": "stop"}),
]
SPANS = [("2", 0, 2), ("3", 2, 4)]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*above, key))


def mutants(good: Any, count: int, draw: random.Random) -> Iterator[Any]:
    """Values that are something else, or not there."""
    for _ in range(count):
        value = copy.deepcopy(good)
        for _ in range(draw.randint(1, 2)):
            *above, last = draw.choice([*places(value)])
            holder = value
            for key in above:
                holder = holder[key]
            if isinstance(holder, dict) and draw.random() < 0.2:
                del holder[last]
            else:
                holder[last] = copy.deepcopy(draw.choice(WORST))
            if not value:
                break
        yield value


def answering(given: Any) -> SglangEngine:
    made = engine()

    async def call(*_: Any, **__: Any) -> Any:
        return given

    made.call = call  # type: ignore[method-assign]
    return made


async def stream(given: Any) -> None:
    put_together = Answer("r", incremental=True)
    for event in given:
        if isinstance(event, dict):
            put_together.add(event)
    engine().segment_of(put_together.complete(), 2, "r")


async def segment(given: Any) -> None:
    found = read(given, sent=2)
    assert all(type(token) is int and 0 <= token < 2**31 for token in found.output_ids)
    assert all(type(logprob) in (int, float) and -3.5e38 < logprob <= 1 for logprob in found.logprobs)
    assert type(found.cached_tokens) is type(found.prompt_tokens) is int


SCORES = {"finish_reason": {"type": "length"}, "input_token_logprobs": [[None, 1, None], [-0.1, 2, None]]}
INFO = {"version": "0.5.20", "max_req_input_len": 8, "tp_size": 1, "pp_size": 1, "speculative_num_draft_tokens": 2}
READERS: dict[str, tuple[Any, Callable[[Any], Awaitable[Any]]]] = {
    "segment": (answer([1, 2, 3, 4], SPANS), segment),
    "stream": ([answer([1, 2]), answer([3, 4], SPANS)], stream),
    "proof": (answer([1]), lambda given: answering(given).prove(1)),
    "scores": ({"meta_info": SCORES | {"weight_version": "3"}}, lambda given: answering(given).score([1, 2], 1)),
    "info": (INFO, lambda given: answering(given).probe()),
}


@pytest.mark.parametrize("name", READERS)
async def test_whatever_an_engine_answers_is_read_or_refused_in_few_words(name: str) -> None:
    good, reader = READERS[name]
    said = [""]
    for given in [*mutants(good, 2000, random.Random(7)), *([] if name == "stream" else WORST)]:
        try:
            await reader(given)
        except PenstockError as exc:
            said.append(str(exc))
    assert 0 < max(map(len, said)) < 2000


def test_an_answer_with_far_more_tokens_than_were_asked_for_is_none() -> None:
    heard = Answer("a/0", incremental=True, most=16)
    ids = [5] * (16 + MAX_OVER)
    event = {"output_ids": ids, "meta_info": {"output_token_logprobs": [[-0.5, 5, None]] * len(ids)}}
    assert len(heard.add(event)[0]) == len(ids), "drafts may overshoot"
    with pytest.raises(EngineError, match="but 16 were requested"):
        heard.add(event)


def test_a_logprob_above_zero_is_none() -> None:
    with pytest.raises(EngineError, match="the logprob 5, above 0"):
        read(answer([1], output_token_logprobs=[[5.0, 1, None]]))
    with pytest.raises(EngineError, match="not a finite number"):
        read(answer([1], output_token_logprobs=[[-1e39, 1, None]]))


class Endless:
    """A server that never comes to an end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500 if self.kind == "refusal" else 200)
        await response.prepare(request)
        event = {"output_ids": [5] * 500, "meta_info": {"output_token_logprobs": [[-0.5, 5, None]] * 500}}
        event["meta_info"] |= {"weight_version": "3"}  # type: ignore[operator]
        chunk = b"data: " + json.dumps(event).encode() + b"\n\n" if self.kind == "stream" else b" " * 65536
        while True:
            await response.write(chunk)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[SglangEngine]:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate)])
        server = TestServer(app)
        await server.start_server()
        config = EngineConfig(url=str(server.make_url("")).rstrip("/"))
        client = SglangEngine(config, ModelConfig(path="."), name="t", log_dir=Path())
        client.version = client.newest = 3
        client.info = ServerInfo(streams_increments=True)
        client.http.open()
        try:
            yield client
        finally:
            await client.stop()
            await server.close()


@pytest.mark.parametrize(
    ("kind", "says"),
    [("body", "more than 1048576 bytes"), ("refusal", "answered /generate with 500"), ("stream", "16 were requested")],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_without_end_is_bounded(
    kind: str, says: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.sglang.controls.MAX_EVENT_BYTES", 2**20)
    heard: dict[str, Any] = {"on_tokens": lambda *_: None} if streamed else {}
    if kind == "stream" and not streamed:
        says = "more than 1048576 bytes"
    if kind == "body" and streamed:
        says = "an event of more than 1048576 bytes"
    async with Endless(kind).up() as client:
        with pytest.raises(EngineError, match=says) as raised:
            await client.generate([1, 2], {"max_new_tokens": 16}, rid="a/0", **heard)
    assert not isinstance(raised.value, EngineDied)


class Streamed(Endless):
    """A server that streams one token, and then the end of the answer."""

    def __init__(self, token: int, logprob: float) -> None:
        super().__init__("stream")
        self._token, self._logprob = token, logprob

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for finish in (None, {"type": "stop"}):
            meta = {"output_token_logprobs": [[self._logprob, self._token, None]], "weight_version": "3"}
            event = {"output_ids": [self._token], "meta_info": meta | {"completion_tokens": 1, "finish_reason": finish}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response


@pytest.mark.parametrize(("token", "logprob"), [(5, -0.5), (45, -0.5), (5, 50.0)])
async def test_T6_a_streamed_token_that_its_answer_cannot_have_is_in_no_prefix(token: int, logprob: float) -> None:
    streamed: list[list[int]] = []
    async with Streamed(token, logprob).up() as client:
        client.vocab_size = 45
        sending = client.generate(
            [1, 2], {"max_new_tokens": 16}, rid="a/0", on_tokens=lambda _, ids, __: streamed.append(ids)
        )
        if (token, logprob) == (5, -0.5):
            await sending
        else:
            with pytest.raises(EngineError):
                await sending
    assert streamed == ([[5]] if (token, logprob) == (5, -0.5) else [])
