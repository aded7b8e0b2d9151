"""What a worker hears: prefixes, checks and verdicts of the verifier pool, and all that an engine answers."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EngineError
from penstock.records.codec import unpack_each
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.jobs.prefixes import Scale, growth_to_bytes, partial_from_bytes, partial_to_bytes
from penstock.workers.rewards.wire import Verdict, sample_from_json, sample_to_json
from penstock.workers.sglang.routed_experts import Routing
from penstock.workers.sglang.segment import count_of, meta_of, read_generated, read_scored, spans_of
from penstock.workers.sglang.server_info import read_info
from penstock.workers.sglang.stream import Answer, read_events
from tests.hostile import SAME, WORST_JSON, is_read_or_refused, json_near, packed_near, value_near

JOB = Job("d/0/1", 2, prompt_ids=[1, 2], metadata={"a": [1, {"b": 2.5}]})
SCALE = Scale(0.7, "original")


def sample() -> Sample:
    made = Sample(JOB, 0, text="ab", turns=["ab"])
    made.append([1, 2])
    made.append([3, 4], version=5, logprobs=[-0.5, -0.25])
    made.prompt_length = 2
    return made


WHOLE = partial_to_bytes(sample(), SCALE)
(FIRST,) = unpack_each(WHOLE, "it")
GROWN = sample()
GROWN.append([7], version=6, logprobs=[-1])
(GROWTH,) = unpack_each(growth_to_bytes(GROWN, 4, 0), "it")


@SAME
@given(first=packed_near(FIRST), growth=packed_near(GROWTH))
def test_a_prefix_is_read_or_refused(first: bytes, growth: bytes) -> None:
    is_read_or_refused(partial_from_bytes, first, JOB, 0, SCALE)
    is_read_or_refused(partial_from_bytes, WHOLE + growth, JOB, 0, SCALE)


@SAME
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)), max_size=4
    ),
    cut=st.integers(0, 3),
)
def test_I7_a_prefix_comes_back_as_it_was_however_it_grew(runs: list[tuple[int, list[int]]], cut: int) -> None:
    made, data = sample(), b""
    for at, (version, tokens) in enumerate(runs):
        if at == cut:
            data = partial_to_bytes(made, SCALE)
        start = len(made.tokens)
        made.append(tokens, version=version, logprobs=[-0.5 * (1 + i) for i in range(len(tokens))])
        if data:
            data += growth_to_bytes(made, start, len(made.turns))
    again = partial_from_bytes(data or partial_to_bytes(made, SCALE), JOB, 0, SCALE)

    for name in ("tokens", "logprobs", "versions", "generated", "loss_mask", "prompt_length", "turns"):
        assert getattr(again, name) == getattr(made, name), name


@SAME
@given(data=json_near(json.loads(sample_to_json(sample(), 10**6))))
def test_a_check_is_read_or_refused(data: bytes) -> None:
    is_read_or_refused(
        sample_from_json, data.decode("utf-8", "surrogatepass") if data.isascii() else data.decode("latin-1")
    )


VERDICT = {"reward": 1.0, "info": {"a": [1]}, "outcome": "", "error": "", "trace": ""}


@SAME
@given(data=json_near(VERDICT))
def test_a_verdict_is_read_or_refused(data: bytes) -> None:
    is_read_or_refused(lambda: Verdict.from_json(data).to_json())


@SAME
@given(reward=st.none() | st.floats(allow_nan=False), texts=st.lists(st.text(max_size=9), min_size=3, max_size=3),
       info=st.dictionaries(st.text(max_size=4), st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3)))  # fmt: skip
def test_a_verdict_arrives_as_it_was(reward: float | None, texts: list[str], info: dict[str, Any]) -> None:
    made = Verdict(reward, info, *texts)

    assert Verdict.from_json(made.to_json().encode()) == made


EVENT = {"output_ids": [3, 4], "meta_info": {
    "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]], "completion_tokens": 2, "weight_version": "7+",
    "weight_versions": [{"version": "7", "start": 0, "end": 2}], "finish_reason": {"type": "stop", "matched": 4},
    "input_token_logprobs": [[None, 1, None], [-0.5, 3, None], [-0.25, 4, None]], "prompt_tokens": 1,
}}  # fmt: skip
INFO = {"version": "0.5.9", "max_req_input_len": 100, "tp_size": 1, "pp_size": 1, "dp_size": 1,
        "speculative_num_draft_tokens": 4, "tokenizer_worker_num": 1, "device": "cpu"}  # fmt: skip


class Body:
    """The body of an answer, in two portions."""

    def __init__(self, data: bytes, cut: int) -> None:
        self._portions = [data[:cut], data[cut:]]

    async def iter_any(self) -> AsyncIterator[bytes]:
        for portion in self._portions:
            yield portion


async def hear(data: bytes, cut: int) -> None:
    answer = Answer("rid", incremental=True, most=4)
    async for event in read_events(Body(data, cut)):
        answer.add(event)
    use(answer.complete())


def use(whole: Any) -> None:
    meta = meta_of(whole, "rid")
    drawn = read_generated(whole, "rid", 0)
    spans_of(meta, len(drawn.ids), "rid")
    count_of(meta, "prompt_tokens", "rid")


@SAME
@given(events=st.lists(json_near(EVENT), max_size=3), cut=st.integers(0, 300))
def test_the_stream_of_an_engine_is_heard_or_refused(events: list[bytes], cut: int) -> None:
    data = b"".join(b"data: " + event.replace(b"\n", b" ") + b"\n\n" for event in events)
    is_read_or_refused(lambda: asyncio.run(hear(data, cut)))


@SAME
@given(answer=value_near(EVENT, WORST_JSON))
def test_an_answer_of_an_engine_is_read_or_refused(answer: Any) -> None:
    is_read_or_refused(use, answer)
    is_read_or_refused(read_scored, answer, [1, 3, 4], 1, 8, "rid")


@SAME
@given(answer=value_near(INFO, WORST_JSON))
def test_what_a_server_says_of_itself_is_read_or_refused(answer: Any) -> None:
    if isinstance(answer, dict):
        is_read_or_refused(read_info, answer)


@SAME
@given(data=st.binary(max_size=60), text=st.text(max_size=20), tokens=st.integers(0, 4))
def test_routed_experts_are_read_or_refused(data: bytes, text: str, tokens: int) -> None:
    routing = Routing(2, 1, 8)
    for said in (base64.b64encode(data).decode(), text, None, 7, [text]):
        is_read_or_refused(routing.read, said, tokens, "rid")


@SAME
@given(rows=st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=5))
def test_T17_routed_experts_are_what_the_engine_said(rows: list[list[int]]) -> None:
    sent = np.array(rows, "<i4")
    found = Routing(2, 1, 8).read(base64.b64encode(sent.tobytes()).decode(), len(rows) + 1, "rid")

    np.testing.assert_array_equal(found[:, :, 0], sent)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_I7_a_number_that_is_none_is_no_logprob(number: str) -> None:
    event = json.dumps(EVENT).replace("-0.25", number)
    with pytest.raises(EngineError):
        asyncio.run(hear(b"data: " + event.encode() + b"\n\n", 10))
