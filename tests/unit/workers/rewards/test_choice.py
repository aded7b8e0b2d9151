"""Which rewards a sample gets, their sum, and what long answers lose."""

from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.config.reward import OverlongConfig
from penstock.errors import ConfigError, RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.score import Rewards, chosen, overlong


def job(**about: Any) -> Job:
    return Job("sums/0/0", 1, label="red cat", **about)


@pytest.mark.parametrize(
    ("function", "own", "rm_type", "by_metadata", "expected"),
    [
        ("f1", None, None, True, "f1"),
        ("f1", None, "", True, "f1"),
        ("f1", None, " dapo ", True, "dapo"),
        ("f1", None, "boxed_f1", True, "boxed_f1"),
        ("f1", None, "dapo", False, "f1"),
        ("f1", "m:own", "dapo", True, "m:own"),
        ("m:run", None, "dapo", True, "m:run"),
    ],
)
def test_a_jobs_own_goes_before_the_runs_function_and_that_before_its_metadata(
    function: str, own: str | None, rm_type: str | None, by_metadata: bool, expected: str
) -> None:
    config = RewardConfig(function=function, by_metadata=by_metadata)
    assert chosen(job(reward=own, metadata={"rm_type": rm_type}), config) == {expected: 1.0}


@pytest.mark.parametrize("name", ["os:getpid", "nope", "boxed_", "boxed_nope", 3, ["f1"], {}, True, "f1\x00"])
def test_an_unknown_rm_type_refuses_the_job_by_name(name: Any) -> None:
    rewards = Rewards(RewardConfig(function="exact_match", by_metadata=True))
    with pytest.raises(ConfigError, match=r"job sums/0/0: rm_type .* is no reward of penstock's own"):
        rewards.check(job(metadata={"rm_type": name}))


async def score(config: RewardConfig, text: str, num_drawn: int = 0, **about: Any) -> Sample:
    sample = Sample(job(**about), 0, text=text, generated=[0] + [1] * num_drawn)
    await Rewards(config).score(sample)
    return sample


async def test_parts_are_summed_by_weight_and_each_is_kept() -> None:
    sample = await score(RewardConfig(parts={"f1": 2.0, "exact_match": -1.0}), "red dog")
    assert sample.reward == 1.0
    assert sample.reward_info["parts"] == {"f1": 0.5, "exact_match": 0.0}
    assert sample.reward_info["said"]["f1"]["em"] == 0.0


async def test_T11_a_sum_that_is_no_finite_number_is_reward_not_a_number() -> None:
    with pytest.raises(RewardError) as caught:
        await score(RewardConfig(parts={"f1": 1e300, "exact_match": 1.0}), "red cat")
    assert caught.value.outcome == "reward_not_a_number"


def test_parts_and_a_function_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="parts replace function f1"):
        RewardConfig(function="f1", parts={"f1": 1.0})


@pytest.mark.parametrize(
    ("num_tokens", "lost"), [(0, 0.0), (60, 0.0), (70, -0.5), (80, -1.0), (100, -2.0), (999, -2.0)]
)
def test_a_long_answer_loses_what_dapos_equation_13_says(num_tokens: int, lost: float) -> None:
    assert overlong(num_tokens, OverlongConfig(max_tokens=100, buffer_tokens=40, factor=2.0)) == lost


async def test_long_answers_lose_in_training_alone() -> None:
    config = RewardConfig(overlong=OverlongConfig(max_tokens=10, buffer_tokens=4))
    assert (await score(config, "red cat", 8)).reward == 0.5
    assert (await score(config, "red cat", 8)).reward_info == {"overlong": -0.5}
    assert (await score(config, "red cat", 8, lane="eval")).reward == 1.0


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="is more than max_tokens"):
        OverlongConfig(max_tokens=10, buffer_tokens=11)
