"""Advantages against a version that is written out."""

import statistics
import sys

import numpy as np
import pytest

from penstock.consumers.batch.advantages import KINDS, Kind, group_advantages
from penstock.errors import ConfigError, ProtocolError

# Uneven groups, not side by side, one of a single sample, one of equal rewards.
REWARDS = [1.0, 0.0, 5.0, 1.0, 7.5, 0.0, 3.0, 0.1, 0.1, 0.1]
GROUPS = ["a", "a", "b", "a", "b", "a", "c", "d", "d", "d"]


def written_out(rewards: list[float], groups: list[str], kind: Kind) -> list[float]:
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        if not others:
            out.append(0.0)
        elif kind == "grpo":
            out.append((reward - statistics.mean(mine)) / (statistics.stdev(mine) + 1e-6))
        elif kind == "rloo":
            out.append(reward - statistics.mean(others))
        else:
            out.append(reward - statistics.mean(mine))
    if kind == "reinforce_pp_baseline":
        mean, deviation = statistics.mean(out), statistics.pstdev(out)
        out = [(value - mean) / (deviation + 1e-6) for value in out]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_T11_advantages_are_those_of_the_own_group(kind: Kind) -> None:
    np.testing.assert_allclose(group_advantages(REWARDS, GROUPS, kind), written_out(REWARDS, GROUPS, kind), atol=1e-9)


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # Of [1, 0, 1, 0]: unbiased 0.5774, biased 0.5.
    np.testing.assert_allclose(group_advantages([1, 0, 1, 0], "aaaa"), [0.86602, -0.86602] * 2, atol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_and_a_group_of_equals_have_advantage_0(kind: Kind) -> None:
    np.testing.assert_allclose(group_advantages([3.0, 0.1, 0.1, 0.1], "cddd", kind), 0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [1e9 + 0.1, -1e9 - 0.3, 1e12 + 0.7, 123456789.123, 1.1e308, -sys.float_info.max])
@pytest.mark.parametrize("size", [3, 7, 16])
def test_T11_a_group_of_equal_large_rewards_has_advantage_0(kind: Kind, reward: float, size: int) -> None:
    assert group_advantages([reward] * size, "a" * size, kind).tolist() == [0.0] * size


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_T11_large_rewards_have_the_advantages_of_their_differences(kind: Kind) -> None:
    small = [0.0, 1.0, 0.5, 4.0, 0.25]
    found = group_advantages([1e9 + reward for reward in small], "a" * 5, kind)
    np.testing.assert_allclose(found, group_advantages(small, "a" * 5, kind), rtol=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [1e39, 1e160, sys.float_info.max])
def test_T11_advantages_of_rewards_that_overflow_are_finite_in_float32(kind: Kind, largest: float) -> None:
    rewards = [largest, -largest, largest, -largest / 4, 1.0, 0.0, 1.0, 0.0]
    found = group_advantages(rewards, "aaaabbbb", kind)
    assert np.isfinite(found.astype(np.float32)).all()
    assert (np.sign(found[:4]) == [1, -1, 1, -1]).all()
    if kind != "reinforce_pp_baseline":  # which compares with the deviation of the complete batch
        np.testing.assert_array_equal(found[4:], group_advantages(rewards[4:], "bbbb", kind))
    weighed = group_advantages(rewards, "aaaabbbb", kind, [0, 0, 0, 0, 1, 2, 3, 4])
    assert np.isfinite(weighed.astype(np.float32)).all()
    if kind == "grpo":
        np.testing.assert_allclose(found[:4], group_advantages([4e6, -4e6, 4e6, -1e6], "aaaa"), rtol=1e-9)


def test_T11_reinforce_pp_whitens_over_loss_tokens_of_the_whole_batch() -> None:
    weights = [3, 1, 0, 2, 5, 4, 1, 0, 2, 2]
    found = group_advantages(REWARDS, GROUPS, "reinforce_pp_baseline", weights)
    centred = written_out(REWARDS, GROUPS, "dr_grpo")
    by_token = np.repeat(centred, weights)
    np.testing.assert_allclose(found, (np.array(centred) - by_token.mean()) / (by_token.std() + 1e-6))
    assert np.repeat(found, weights).mean() == pytest.approx(0, abs=1e-9)
    assert group_advantages([1.0, 2.0], "aa", "reinforce_pp_baseline", [0, 0]).tolist() == [0, 0]
    with pytest.raises(ProtocolError, match="1 weights for 2 rewards"):
        group_advantages([1.0, 2.0], "aa", "reinforce_pp_baseline", [1])


@pytest.mark.parametrize("kind", KINDS)
def test_T11_a_masked_sample_takes_part_in_no_advantage(kind: Kind) -> None:
    masked = [False, True, False, False, True, False, False, False, True, False]
    kept = [i for i, one in enumerate(masked) if not one]
    weights = [0 if one else 3 + i for i, one in enumerate(masked)]
    found = group_advantages(REWARDS, GROUPS, kind, weights, masked)
    alone = group_advantages([REWARDS[i] for i in kept], [GROUPS[i] for i in kept], kind, [weights[i] for i in kept])
    np.testing.assert_allclose(found[kept], alone)
    assert not found[np.array(masked)].any()
    assert not group_advantages([1.0, 2.0], "aa", kind, masked=[True, True]).any()


def test_no_samples_no_advantages() -> None:
    assert group_advantages([], []).tolist() == []


def test_what_cannot_be_an_advantage_is_refused() -> None:
    with pytest.raises(ProtocolError, match="group b has reward nan"):
        group_advantages([1.0, float("nan")], ["a", "b"])
    with pytest.raises(ProtocolError, match="2 rewards for 1 group"):
        group_advantages([1.0, 2.0], ["a"])
    with pytest.raises(ConfigError, match="use grpo, dr_grpo, rloo or reinforce_pp_baseline"):
        group_advantages([1.0], ["a"], "ppo")  # type: ignore[arg-type]
