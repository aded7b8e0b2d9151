"""Rewards of whole groups: places among the answers, and what a function of the user's may give."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config, RewardConfig
from penstock.config.hooks import GROUP_REWARDS
from penstock.errors import ConfigError, JudgeError, RewardError
from penstock.hooks.slime import SlimeSample
from penstock.hooks.user_imports import named
from penstock.names import Lane
from penstock.records.job import Job, JobFailure
from penstock.records.sample import Sample
from penstock.workers.rewards import group_reward as module
from penstock.workers.rewards.group_reward import GroupReward, ranks, shortest_right
from penstock.workers.rewards.judges import Judges

HERE = "tests.unit.workers.rewards.test_group_reward"


def samples(*alone: float | None, lengths: Sequence[int] = ()) -> list[Sample]:
    """Samples with these rewards, and so many drawn tokens each."""
    made = []
    for k, reward in enumerate(alone):
        sample = Sample(Job("d/0/0", len(alone)), k, reward=reward)
        sample.append([1])
        sample.append([2] * (lengths[k] if lengths else 1), version=0, logprobs=[-1.0] * (lengths[k] if lengths else 1))
        made.append(sample)
    return made


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        ((3.0,), [0.5]),
        ((1.0, 2.0), [0.0, 1.0]),
        ((5.0, 5.0), [0.5, 0.5]),
        ((-1.0, 1e9, 0.0), [0.0, 1.0, 0.5]),
        ((0.0, 1.0, 1.0, 0.0, 0.5), [0.125, 0.875, 0.875, 0.125, 0.5]),
    ],
)
def test_ranks_are_the_share_of_the_others_that_an_answer_beats(alone: tuple[float], expected: list[float]) -> None:
    assert ranks(samples(*alone)) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_ranks_do_not_heed_scale_and_their_mean_is_a_half(alone: list[float]) -> None:
    found = ranks(samples(*alone))

    assert sum(found) / len(found) == pytest.approx(0.5)
    assert found == ranks(samples(*[2.0 * one for one in alone]))
    for mine, score in zip(found, alone, strict=True):
        for other, than in zip(found, alone, strict=True):
            assert (mine < other) == (score < than)


@pytest.mark.parametrize(
    ("alone", "lengths", "expected"),
    [
        ((0.0, -1.0), (1, 2), [0.0, 0.0]),
        ((1.0, 0.0), (9, 1), [1.0, 0.0]),
        ((1.0, 1.0, 0.0, 0.5), (30, 10, 1, 20), [0.5, 1.0, 0.0, 0.75]),
        ((1.0, 1.0), (7, 7), [0.75, 0.75]),
    ],
)
def test_the_shortest_right_answer_comes_first_and_a_wrong_one_never(
    alone: tuple[float], lengths: tuple[int], expected: list[float]
) -> None:
    assert shortest_right(samples(*alone, lengths=lengths)) == expected


# --- functions of the user's ------------------------------------------------------------------------------------------


def plain(group: Sequence[Sample]) -> list[float]:
    return [float(one.k) for one in group]


async def awaited(group: Sequence[Sample]) -> Any:
    return np.array([0.5, 1.5], np.float32)


def of_slime(args: Any, group: Sequence[SlimeSample], **kwargs: Any) -> list[float]:
    return [args.bonus + one.reward + one.response_length for one in group]


async def of_slime_awaited(args: Any, group: Sequence[SlimeSample]) -> list[float]:
    return of_slime(args, group)


def dicts(group: Sequence[Sample]) -> Any:
    return [{"score": one.k, "beats": [0]} for one in group]


def bools(group: Sequence[Sample]) -> tuple[bool, ...]:
    return (True, False)


def none(group: Sequence[Sample]) -> None:
    return None


def mapping(group: Sequence[Sample]) -> dict[int, float]:
    return {0: 1.0, 1: 2.0}


def endless(group: Sequence[Sample]) -> Any:
    while True:
        yield 1.0


class Odd:
    def __len__(self) -> int:
        raise LookupError("it has none")


def odd(group: Sequence[Sample]) -> Odd:
    return Odd()


async def judged(group: Sequence[Sample], judges: Judges) -> list[float]:
    raise JudgeError(JobFailure.REWARD_TIMEOUT, f"one of {len(list(judges))} judges sleeps")


def judged_without_waiting(group: Sequence[Sample], judges: Judges) -> list[float]:
    return [0.0]


async def scored(name: str, group: Sequence[Sample], **over: Any) -> list[tuple[float, dict[str, Any]]]:
    config = RewardConfig(group=name if name in GROUP_REWARDS else f"{HERE}:{name}", **over)
    return await GroupReward(config, Judges(()), Namespace(bonus=10.0)).score(group)


@pytest.mark.parametrize(
    ("function", "numbers", "said"),
    [
        (plain, [0.0, 1.0], {}),
        (awaited, [0.5, 1.5], {}),
        (dicts, [0.0, 1.0], {"beats": [0]}),
        (of_slime, [19.0, 20.0], {}),
        (of_slime_awaited, [19.0, 20.0], {}),
        (bools, [1.0, 0.0], {}),
    ],
)
async def test_each_sample_gets_its_number_and_keeps_what_was_said_of_it_alone(
    function: Callable[..., Any], numbers: list[float], said: dict[str, Any]
) -> None:
    group = samples(7.0, 8.0)
    group[1].reward_info = {"pred": "x"}

    found = await scored(function.__name__, group)

    assert [number for number, _ in found] == numbers
    assert [info for _, info in found] == [{**said, "sample_reward": 7.0}, {"pred": "x", **said, "sample_reward": 8.0}]
    assert [one.reward for one in group] == [7.0, 8.0]


@pytest.mark.parametrize("function", [none, mapping, endless, odd])
async def test_T11_what_is_no_list_of_numbers_has_a_name(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError) as refused:
        await scored(function.__name__, samples(1.0, 2.0))
    assert refused.value.outcome == "reward_not_a_number"


async def test_T11_a_judge_that_gives_no_answer_fails_the_group_by_its_name_and_is_not_asked_again() -> None:
    with pytest.raises(RewardError, match=f"group d/0/0: reward {HERE}:judged: one of 0 judges sleeps") as failed:
        await scored("judged", samples(1.0), max_attempts=3)
    assert failed.value.outcome == "reward_timeout"
    with pytest.raises(ConfigError, match="make it async"):
        await scored("judged_without_waiting", samples(1.0))


def test_only_groups_that_are_trained_on_get_one() -> None:
    own = GroupReward(RewardConfig(group="ranks"), Judges(()))
    assert [own.is_for(Job("d/0/0", 2, lane=lane)) for lane in (Lane.TRAIN, Lane.EVAL, Lane.SCORE)] == [
        True, False, False,
    ]  # fmt: skip
    assert not GroupReward(RewardConfig(), Judges(())).is_for(Job("d/0/0", 2))


def test_names_are_those_of_the_configuration() -> None:
    assert set(GROUP_REWARDS) == set(module._OWN)
    with pytest.raises(ValueError, match="unknown group reward 'rank': did you mean ranks"):
        RewardConfig(group="rank")
    with pytest.raises(ConfigError, match=r"reward\.group nowhere:f cannot be imported: there is no module nowhere"):
        GroupReward(RewardConfig(group="nowhere:f"), Judges(()))
    config = Config.model_validate(
        {
            "run": "r",
            "model": {"path": "m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "reward": {"group": "mine:f"},
        }
    )
    assert ("reward.group", "mine:f") in named(config)
