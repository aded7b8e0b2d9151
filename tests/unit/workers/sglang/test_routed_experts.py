"""Routing of experts beside samples (T17): as engines tell it, and put together over the requests of a sample."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.config import Config
from penstock.errors import ConfigError, EngineError
from penstock.names import ROUTED_EXPERTS
from penstock.records.sample import Drawn, Sample
from penstock.workers.engine import Rows, Segment
from penstock.workers.jobs.prefixes import partial_from_bytes, partial_to_bytes
from penstock.workers.router.members import engine_config, refuse_dropped
from penstock.workers.sglang.routed_experts import FLAG, Routing, routing_of
from tests.unit.workers.jobs.test_generate import JOB, Echo, ScriptedEngine, make, segment
from tests.unit.workers.sglang.test_engine_answers import answer, engine

ROUTING = Routing(layers=2, top_k=3, num_experts=8)


def wire(rows: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()


def told(mark: int, num_tokens: int, like: Segment) -> Segment:
    """A segment that tells ``mark`` as the expert of every position of a sequence of so many tokens."""
    return replace(like, experts=np.full((num_tokens - 1, 2, 3), mark, np.uint8))


class RoutedScript(ScriptedEngine):
    returns_routing = True


def marks(sample: Sample) -> list[int]:
    rows: Rows = sample.sides[ROUTED_EXPERTS]
    assert rows.shape == (len(sample.tokens) - 1, 2, 3)
    assert rows.dtype == np.uint8
    return [int(mark) for mark in rows[:, 0, 0]]


async def test_T17_every_token_but_the_last_has_its_experts() -> None:
    sample = await make(RoutedScript(told(5, 7, segment("xyz", "stop", eos=True))))
    assert marks(sample) == [5] * 6


async def test_T17_what_a_token_was_drawn_from_stays_when_its_prefix_is_computed_anew() -> None:
    engine = RoutedScript(
        told(1, 5, segment("xy", "abort", 1)),
        segment("", "abort", 2),  # it was aborted before it ran
        told(2, 7, segment("zw", "abort", 2)),
        told(3, 9, segment("v", "stop", 3, eos=True)),
    )
    sample = await make(engine)
    # Row i is of the request that drew token i + 1.
    assert sample.versions[1:] == [-1, -1, 1, 1, 2, 2, 3, 3]
    assert marks(sample) == [1, 1, 1, 1, 2, 2, 3, 3]


async def test_T17_turns_and_observations_have_theirs() -> None:
    engine = RoutedScript(told(1, 5, segment("uv", "stop")), told(2, 8, segment("w", "stop")))
    sample = await make(engine, environment=Echo())
    observed = len(sample.tokens) - 6
    assert marks(sample) == [1] * 4 + [2] * (observed + 1)


async def test_T17_a_prefix_from_elsewhere_whose_experts_are_not_told_is_drawn_anew() -> None:
    engine = RoutedScript(told(1, 5, segment("xy", "abort", 1)), EngineError("gone"))
    partial = Sample(JOB, 0)
    with pytest.raises(EngineError):
        await make(engine, partial=partial)
    elsewhere, account = partial_from_bytes(partial_to_bytes(partial), JOB, 0), Drawn()
    anew = RoutedScript(told(2, 5, segment("z", "stop", 2, eos=True)))
    sample = await make(anew, partial=elsewhere, account=account)
    assert (sample.text, marks(sample), account.lost_turn) == ("z", [2] * 4, 2)
    kept = RoutedScript(told(3, 7, segment("z", "stop", 3, eos=True)))
    assert marks(await make(kept, partial=partial)) == [1] * 4 + [3] * 2, "here they were told"


def test_T17_tokens_whose_experts_nobody_tells_are_thrown_away_to_be_drawn_anew() -> None:
    """Of a request that is aborted while it waits again after tokens; rows of a later pass would take their place."""
    client, aborted = engine(), {"finish_reason": {"type": "abort"}}
    client.routing = ROUTING
    thrown = client.segment_of(answer([1, 2], **aborted), 3, "r")
    assert (thrown.output_ids, thrown.finish_reason, thrown.num_discarded) == ([], "abort", 2)
    assert "expert routing" in thrown.message
    assert client.segment_of(answer([], **aborted), 3, "r").experts is None, "it never ran"
    with pytest.raises(EngineError, match="returned no expert routing"):
        client.segment_of(answer([1, 2]), 3, "r")


async def test_rows_behind_a_stop_are_cut_with_their_tokens() -> None:
    job = replace(JOB, sampling={"stop": ["yz"]})
    engine = RoutedScript(told(1, 5, segment("xy", "abort", 1)), told(2, 8, segment("zab", "length", 1)))
    sample = await make(engine, job)
    assert sample.text == "x"
    assert len(sample.tokens) == 6, "cut behind the stop, which stays among the tokens"
    assert marks(sample) == [1] * 4 + [2] * (len(sample.tokens) - 5)


async def test_an_engine_that_told_too_little_is_at_fault() -> None:
    with pytest.raises(EngineError, match="routing for 0 positions, but 7 tokens need 6"):
        await make(RoutedScript(segment("xyz", "stop", eos=True)))


async def test_without_routing_an_environment_may_set_its_own() -> None:
    engine = ScriptedEngine(segment("xyz", "stop", eos=True))
    partial = Sample(JOB, 0, sides={ROUTED_EXPERTS: "mine"})
    sample = await make(engine, partial=partial)
    assert sample.sides == {ROUTED_EXPERTS: "mine"}


def test_rows_come_in_the_smallest_type_and_without_what_was_not_asked() -> None:
    rows = np.arange(4 * 2 * 3).reshape(4, 2, 3) % 8
    read = ROUTING.read(wire(rows), 4, "r")
    np.testing.assert_array_equal(read, rows[:3])
    assert read.dtype == np.uint8
    assert replace(ROUTING, num_experts=384).read(wire(rows), 5, "r").dtype == np.int16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "returned no expert routing"),
        (7, "returned no expert routing"),
        ("not base64!", "cannot be read"),
        ("AAA=", "cannot be read"),
        (wire(np.zeros((2, 2, 3))), "has 12 numbers, but 4 tokens, 2 layers and 3 experts per token need 18"),
        (wire(np.zeros(19)), "has 19 numbers"),
        (wire(np.full((3, 2, 3), 8)), "has expert 8, but the model has 8"),
        (wire(np.full((3, 2, 3), -1)), "has expert -1, but the model has 8"),
    ],
)
def test_what_cannot_be_the_routing_is_refused(text: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        ROUTING.read(text, 4, "r")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_shape_is_read_from_the_models_config(name: str) -> None:
    config = {"num_hidden_layers": 2, "num_experts_per_tok": 3, name: 8}
    assert routing_of(config, "m") == routing_of({"text_config": config}, "m") == ROUTING


def test_a_dense_model_is_refused_early() -> None:
    with pytest.raises(ConfigError, match="m is not a mixture of experts"):
        routing_of({"num_hidden_layers": 2}, "m")


def config_of(**sections: Any) -> Config:
    data = {"train": [{"name": "d", "path": "d.jsonl"}]}
    return Config.model_validate({"run": "r", "model": {"path": "m"}, "data": data} | sections)


def test_the_server_of_a_run_that_asks_for_routing_is_told_to_tell() -> None:
    assert engine_config(config_of(rollout={"sides": [ROUTED_EXPERTS]})).args[FLAG] is True
    assert FLAG not in engine_config(config_of()).args


def test_a_router_would_not_pass_the_routing_on() -> None:
    with pytest.raises(ConfigError, match="sglang-router does not forward"):
        refuse_dropped(config_of(rollout={"sides": [ROUTED_EXPERTS]}))
    refuse_dropped(config_of())
