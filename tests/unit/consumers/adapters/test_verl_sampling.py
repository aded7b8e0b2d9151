"""What verl's agent loops ask for, in penstock's words: passed on, or refused by name."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.consumers.adapters.inside_verl.sampling import LANE, check_trained, lane_of, sampling_of, told
from penstock.errors import ConfigError

#: As verl's agent loop worker begins.
SAID: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ({}, {}),
        ({"top_k": 0, "n": 1, "logprobs": 0, "bad_words": [], "logit_bias": None, "allowed_token_ids": None}, {}),
        ({"stop": "###"}, {"stop": ["###"]}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop_token_ids": np.array([5, 6])}, {"stop_token_ids": [5, 6]}),
        ({"min_tokens": 5, "ignore_eos": True}, {"min_new_tokens": 5, "ignore_eos": True}),
        ({"max_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_tokens": 9, "max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"seed": 3, "include_stop_str_in_output": True}, {"sampling_seed": 3, "no_stop_trim": True}),
        ({"top_k": np.int64(20), "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"logit_bias": {"3": 5.0}, "regex": "a+"}, {"logit_bias": {"3": 5.0}, "regex": "a+"}),
        ({LANE: "train"}, {}),
    ],
)
def test_what_an_agent_loop_asks_for_is_passed_on(said: dict[str, Any], asked: dict[str, Any]) -> None:
    assert sampling_of(SAID | said) == {"temperature": 1.0} | asked


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"bad_words": ["x"]}, "bad_words is not a sampling parameter"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not a sampling parameter"),
        ({"logprobs": 5}, "logprobs is not a sampling parameter"),
        ({"do_sample": False}, "did you mean temperature"),
        ({"n": 2}, "n 2: a call has one answer"),
        ({"max_tokens": 0}, "max_new_tokens is a whole number of at least 1, not 0"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_new_tokens twice, 3 and 4"),
        ({"top_p": 2}, "top_p is a number from 0 to 1, not 2"),
        ({"structured_outputs": object()}, "structured_outputs holds a object"),
    ],
)
def test_what_penstock_cannot_draw_by_is_refused_by_name(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sampling_of(SAID | said)


def test_T6_T7_training_is_drawn_as_verl_takes_it_to_be() -> None:
    check_trained(sampling_of(SAID | {"stop": ["</tool>"], "stop_token_ids": [3], "max_tokens": 4}), 1.0)
    for said in ({"temperature": 0.7}, {"temperature": 0}):
        with pytest.raises(ConfigError, match="in training, and verl divides by"):
            check_trained(sampling_of(SAID | said), 1.0)
    for said in ({"top_p": 0.9}, {"repetition_penalty": 1.1}, {"min_tokens": 2}, {"regex": "a"}):
        with pytest.raises(ConfigError, match=f"{next(iter(said)).removeprefix('min_tokens')}.*another distribution"):
            check_trained(sampling_of(SAID | said), 1.0)


def lane_told(said: dict[str, Any], *, validate: bool, temperature: float = 1.0, by_name: bool = False) -> str:
    async def run(worker: Any, sampling_params: Any, trajectory: Any, *, agent_name: str) -> str:
        assert agent_name == "tool_agent"
        assert sampling_params == said | {LANE: sampling_params[LANE]}
        return lane_of(sampling_params)

    worker, trajectory = (
        SimpleNamespace(rollout_config=SimpleNamespace(temperature=temperature)),
        {"validate": validate},
    )
    given: Any = {"trajectory": trajectory} if by_name else {}
    rest: Any = () if by_name else (trajectory,)
    return str(asyncio.run(told(run)(worker, said, *rest, agent_name="tool_agent", **given)))  # type: ignore[arg-type]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_lane_is_what_verls_worker_knows(by_name: bool) -> None:
    assert lane_told(SAID, validate=False, by_name=by_name) == "train"
    assert lane_told(SAID, validate=True, by_name=by_name) == "eval"


def test_greedy_baselines_beside_training_are_not_trained() -> None:
    greedy = SAID | {"temperature": 0}
    assert lane_told(greedy, validate=False) == "eval"
    assert lane_told(greedy, validate=False, temperature=0) == "train"


def test_a_lane_that_was_not_passed_on_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"agent_loop_manager_class=.*pass on what they are given"):
        lane_of(SAID)
