"""What a reward may say of steps, and what it may not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards import score

LENGTH = 5


def sample() -> Sample:
    made = Sample(Job("d/0/0", 1, prompt="1+1="), 0)
    made.append([1, 2, 3])
    made.prompt_length = 3
    made.append([5] * LENGTH, version=1, logprobs=[-0.5] * LENGTH)
    return made


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, None),
        ({"step_rewards": []}, {}),
        ({"step_rewards": [[0, 1], [4, -0.5]]}, {0: 1.0, 4: -0.5}),
        ({"token_rewards": [0, 1, 0, 0, 2.5]}, {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0, 4: 2.5}),
    ],
)
def test_what_is_said_of_steps_leaves_the_entries(said: dict[str, Any], found: score.Steps | None) -> None:
    info = {"why": "so"} | said
    assert score.take_out(info, sample(), "r") == found
    assert info == {"why": "so"}


@pytest.mark.parametrize(
    "said",
    [
        {"step_rewards": [[0, 1]], "token_rewards": [0] * LENGTH},
        {"step_rewards": [[LENGTH, 1]]},
        {"step_rewards": [[-1, 1]]},
        {"step_rewards": [[2, 1], [2, 1]]},
        {"step_rewards": [[3, 1], [2, 1]]},
        {"step_rewards": [[True, 1]]},
        {"step_rewards": [[0, float("nan")]]},
        {"step_rewards": [[0, 1, 2]]},
        {"step_rewards": {"0": 1}},
        {"step_rewards": "high"},
        {"token_rewards": [0] * (LENGTH - 1)},
        {"token_rewards": [0] * (LENGTH - 1) + [1e39]},
        {"token_rewards": [0] * (LENGTH - 1) + ["1"]},
        {"token_rewards": None},
        {"step_rewards": [[0, 10**400]]},
    ],
)
def test_T11_what_is_no_reward_of_steps_is_a_named_failure(said: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"sample d/0/0/0: reward r gave (step|token)_rewards"):
        score.take_out(dict(said), sample(), "r")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=12))
def test_anything_is_rewards_of_steps_or_a_named_failure(said: Any) -> None:
    try:
        found = score.take_out({"step_rewards": said}, sample(), "r")
    except RewardError:
        return
    assert found is not None
    array = score.as_array(found)
    assert array.shape == (len(found), 2)
    assert array[:, 0].tolist() == sorted(found)


@pytest.mark.parametrize(
    "side",
    [
        [[0, 1, 2]],
        [0.5],
        [[LENGTH, 1.0]],
        [[-1, 1.0]],
        [[0.5, 1.0]],
        [[2, 1.0], [2, 1.0]],
        [[0, float("nan")]],
        [["a", "b"]],
    ],
)
def test_T17_a_side_array_that_a_hook_set_and_that_is_none_is_a_named_failure(side: list[Any]) -> None:
    made = sample()
    made.sides["step_rewards"] = np.array(side)
    with pytest.raises(
        RewardError, match=r"sample d/0/0/0: its side array 'step_rewards' of shape .* is not \[steps, 2\]"
    ):
        score.keep(made, None)


def test_T17_what_parts_add_up_to_is_a_number_too() -> None:
    with pytest.raises(RewardError, match="is not"):
        score.keep(sample(), score.added({}, {0: 3e38}, 10.0))
    made = sample()
    score.keep(made, {1: 0.5})
    score.keep(made, None)
    assert made.sides["step_rewards"].tolist() == [[1.0, 0.5]]


def test_parts_add_up_by_their_weights() -> None:
    assert score.added({0: 1.0, 2: 2.0}, {2: 1.0, 3: 4.0}, 0.5) == {0: 1.0, 2: 2.5, 3: 2.0}
