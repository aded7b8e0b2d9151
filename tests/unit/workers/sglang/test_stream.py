"""Answers out of their stream, and samples that hear them: T6 (nothing newer is claimed), T8 (a stop is a stop)."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import EngineDied, EngineError, EngineRefused, PayloadError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.engine import Segment
from penstock.workers.jobs.prefixes import growth_to_bytes, partial_from_bytes, partial_to_bytes
from penstock.workers.sglang.args import with_switch
from penstock.workers.sglang.stream import MAX_EVENT_BYTES, Answer, read_events
from tests.unit.workers.jobs.test_generate import EOS, JOB, Letters, ScriptedEngine, make, segment


class Body:
    """Bytes that arrive in portions."""

    def __init__(self, *portions: bytes) -> None:
        self.portions = portions

    async def iter_any(self) -> AsyncIterator[bytes]:
        for portion in self.portions:
            yield portion


def event(ids: list[int], entries: list[Any] | None = None, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    entries = entries if entries is not None else [[-0.5, token, None] for token in ids]
    return {"output_ids": ids, "meta_info": {"output_token_logprobs": entries, "finish_reason": finish}}


async def events_of(*portions: bytes) -> list[dict[str, Any]]:
    return [one async for one in read_events(Body(*portions))]


async def test_events_are_read_however_their_bytes_are_cut() -> None:
    whole = b"".join(b"data: " + json.dumps(event([i])).encode() + b"\n\n" for i in range(3)) + b"data: [DONE]\n\n"
    for size in (1, 7, len(whole)):
        portions = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert [one["output_ids"] for one in await events_of(*portions)] == [[0], [1], [2]]


async def test_nothing_behind_the_end_mark_is_read() -> None:
    assert await events_of(b"data: [DONE]\n\ndata: garbage\n\n") == []


@pytest.mark.parametrize("data", [b"data: <html>\n", b"data: 3\n"])
async def test_a_stream_of_something_else_is_an_error(data: bytes) -> None:
    with pytest.raises(EngineError, match="streamed an event that is not"):
        await events_of(data)


async def test_an_event_without_an_end_is_bounded() -> None:
    with pytest.raises(EngineError, match="more than"):
        await events_of(b"data: ", b"x" * (MAX_EVENT_BYTES + 1))


@pytest.mark.parametrize("incremental", [True, False])
def test_an_answer_is_put_together_and_told_once(incremental: bool) -> None:
    answer = Answer("a/0/0/0", incremental=incremental)
    on_tokens: list[int] = []
    seen: list[int] = []
    for new in ([4], [5, 6], [], [7]):
        seen += new
        ids, logprobs = answer.add(event(new if incremental else list(seen)))
        assert len(ids) == len(logprobs)
        on_tokens += ids
    assert on_tokens == [4, 5, 6, 7]
    assert not answer.is_finished
    answer.add(event([8] if incremental else [4, 5, 6, 7, 8], finish={"type": "stop"}))
    assert answer.is_finished
    assert answer.complete()["output_ids"] == [4, 5, 6, 7, 8]
    assert [entry[1] for entry in answer.complete()["meta_info"]["output_token_logprobs"]] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_tells_by_its_counts_what_it_repeats(incremental: bool) -> None:
    """Of servers behind a router one may repeat and another not, whatever the first of them said."""
    answer = Answer("a/0/0/0", incremental=not incremental)
    on_tokens: list[int] = []
    seen: list[int] = []
    for new in ([4], [5, 6], [7], []):
        seen += new
        one = event(new if incremental else list(seen))
        one["meta_info"]["completion_tokens"] = len(seen)
        on_tokens += answer.add(one)[0]
    assert on_tokens == answer.complete()["output_ids"] == [4, 5, 6, 7]


def test_tokens_are_heard_no_sooner_than_their_logprobs() -> None:
    answer = Answer("a/0/0/0", incremental=True)
    assert answer.add(event([4, 5], entries=[[-0.5, 4, None]])) == ([4], [-0.5])
    assert answer.add(event([6], entries=[[-0.6, 5, None], [-0.7, 6, None]])) == ([5, 6], [-0.6, -0.7])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"error": {"message": "too long", "code": 400}}, EngineRefused),
        ({"error": {"message": "broken", "code": 500}}, EngineError),
        (event([4], finish={"type": "abort", "status_code": 400, "message": "no"}), EngineRefused),
        (event([4], finish={"type": "abort", "status_code": 503, "message": "no"}), EngineError),
        (event([4], entries=[[None, 4, None]]), EngineError),
        (event([4], entries=[[-0.5, 5, None]]), EngineError),
    ],
)
def test_what_an_event_tells_of_an_error_is_one(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        Answer("a/0/0/0", incremental=True).add(bad)
    assert type(raised.value) is error


class StreamingEngine(ScriptedEngine):
    """Tells portions of version 1 before each answer."""

    def __init__(self, *answers: Any, portions: list[str]) -> None:
        super().__init__(*answers)
        self.portions = portions

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, rid: str, on_tokens: Any = None, interval: int = 1
    ) -> Segment:
        assert interval == 4
        while self.portions:
            ids = [ord(letter) - 96 for letter in self.portions.pop(0)]
            on_tokens(1, ids, [-0.5] * len(ids))
        return await super().generate(input_ids, sampling, rid=rid)


async def test_T6_the_end_of_an_answer_takes_the_place_of_what_was_heard_of_it() -> None:
    looks: list[list[int]] = []
    sample = Sample(JOB, 0)
    answer = Segment([24, 25, 26, EOS], [-1.0, -2.0, -3.0, -4.0], [1, 1, 2, 2], "stop", 0, 3)
    engine = StreamingEngine(answer, portions=["x", "yz"])
    await make(engine, partial=sample, interval=4, on_growth=lambda: looks.append(list(sample.versions)))
    assert looks == [[-1, -1, -1, 1], [-1, -1, -1, 1, 1, 1]]
    assert sample.versions == [-1, -1, -1, 1, 1, 2, 2]
    assert sample.logprobs[3:] == [-1.0, -2.0, -3.0, -4.0]
    assert engine.asked[0][0] == [1, 2, 3]
    assert 0 < sample.started_s <= sample.first_token_s <= sample.started_s + sample.generate_s + 1


async def test_I4_what_was_heard_of_an_engine_that_died_stays() -> None:
    sample = Sample(JOB, 0)
    engine = StreamingEngine(segment("uv", "abort", 1), EngineDied("gone"), portions=[])
    engine.answers.insert(1, lambda: refill())

    async def refill() -> Segment:
        engine.portions += ["w", "xy"]
        return segment("", "abort", 1)

    with pytest.raises(EngineDied):
        await make(engine, partial=sample, interval=4)
    assert sample.tokens == [1, 2, 3, *(ord(letter) - 96 for letter in "uvwxy")]
    assert sample.finish_reason == "abort"
    done = await make(
        ScriptedEngine(segment("z", "stop")), partial=partial_from_bytes(partial_to_bytes(sample), JOB, 0)
    )
    assert done.text == "uvwxyz"
    assert done.first_token_s == sample.first_token_s > 0


async def test_the_first_token_of_an_answer_that_is_not_looked_at_has_no_time() -> None:
    assert (await make(ScriptedEngine(segment("uv", "stop", 1)))).first_token_s == 0


async def test_T8_a_stop_that_began_before_the_request_is_not_gone_on_behind() -> None:
    """The engine took the prefix for prompt and does not see the stop string; a kill must not hide it either."""
    job = Job(id="d/0/0", n=1, prompt="abc", sampling={"stop": ["vwx"]})
    begun = Sample(job, 0)
    with pytest.raises(EngineDied):
        await make(ScriptedEngine(segment("uv", "abort"), EngineDied("gone")), job, partial=begun)
    with pytest.raises(EngineDied):
        await make(StreamingEngine(EngineDied("gone"), portions=["w", "xyz"]), job, partial=begun, interval=4)
    again = partial_from_bytes(partial_to_bytes(begun), job, 0)
    done = await make(ScriptedEngine(), job, partial=again)
    assert Letters().decode(done.tokens) == "abcuvwx", "the tokens keep the stop that was drawn"
    assert (done.text, done.status) == ("u", "completed")


async def test_T6_what_is_not_proven_is_counted_until_it_is_thrown_away_or_the_end_tells() -> None:
    sample, answer = Sample(JOB, 0), segment("uvw", "abort")
    unsure = replace(answer, unproven=[False, True, True])
    engine = StreamingEngine(unsure, EngineDied("gone"), portions=["u"])
    engine.answers.insert(1, lambda: refill())

    async def refill() -> Segment:
        engine.version, engine.portions = 2, ["xy"]
        return segment("", "abort")

    with pytest.raises(EngineDied):
        await make(engine, partial=sample, interval=4)
    assert sample.num_unproven == 2 + 2, "two of the answer's, two that were on_tokens under newer weights"
    again = partial_from_bytes(partial_to_bytes(sample), JOB, 0)
    start = len(again.tokens)
    again.append([26], version=1, logprobs=[-0.5])
    again.num_unproven += 1
    data = partial_to_bytes(sample) + growth_to_bytes(again, start, len(again.turns))
    assert partial_from_bytes(data, JOB, 0).num_unproven == 5
    done = await make(ScriptedEngine(replace(segment("z", "stop"), unproven=[True])), partial=sample)
    assert done.num_unproven == 5


async def test_I4_a_prefix_grows_by_records() -> None:
    sample = Sample(JOB, 0)
    with pytest.raises(EngineDied):
        await make(ScriptedEngine(segment("uv", "abort", 1), EngineDied("gone")), partial=sample)
    data = partial_to_bytes(sample)
    for text, version in (("wx", 1), ("y", 2)):
        start = len(sample.tokens)
        sample.append([ord(letter) - 96 for letter in text], version=version, logprobs=[-0.25] * len(text))
        data += growth_to_bytes(sample, start, len(sample.turns))
    again = partial_from_bytes(data, JOB, 0)
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions", "prompt_length"):
        assert getattr(again, name) == getattr(sample, name)
    for bad in (
        data[:-1],
        data + growth_to_bytes(sample, 3, len(sample.turns)),
        data + b"\xc0",
        growth_to_bytes(sample, 3, len(sample.turns)),
    ):
        with pytest.raises(PayloadError, match="d/0/0/0"):
            partial_from_bytes(bad, JOB, 0)


def test_a_spawned_server_streams_each_token_once_unless_told_otherwise() -> None:
    flag = "incremental-streaming-output"
    assert with_switch(EngineConfig(), flag).args == {flag: True}
    own = EngineConfig(args={"incremental_streaming_output": False})
    assert with_switch(own, flag) is own
    assert with_switch(EngineConfig(url="http://127.0.0.1:1"), flag).args == {}
