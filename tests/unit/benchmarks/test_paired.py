"""Pairs of windows, and the interval of their ratios."""

import math

import pytest

from benchmarks.paired import interval, null_ratios, pair_ratios, turns

LEGS = ("without", "history")


def test_neither_leg_is_always_the_first() -> None:
    assert turns(LEGS, 3) == ["without", "history", "history", "without", "without", "history"]


def test_a_drift_that_is_even_is_no_effect() -> None:
    named = turns(LEGS, 8)
    drifting = [100.0 * 0.99**place for place in range(len(named))]

    found = interval(pair_ratios(drifting, named, "history"))

    assert found.ratio == pytest.approx(1.0)
    assert found.low < 1.0 < found.high


def test_a_cost_of_a_twentieth_is_seen_beside_noise_of_a_hundredth() -> None:
    named = turns(LEGS, 12)
    noise = [1.0 + 0.01 * math.sin(7.0 * place) for place in range(len(named))]
    rates = [(95.0 if leg == "history" else 100.0) * one for leg, one in zip(named, noise, strict=True)]

    found = interval(pair_ratios(rates, named, "history"))

    assert found.low < 0.95 < found.high
    assert found.high < 0.97


def test_the_interval_is_students() -> None:
    found = interval([math.exp(x) for x in (-0.1, 0.0, 0.1)])

    half = 4.303 * 0.1 / math.sqrt(3)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.0, math.exp(-half), math.exp(half)))


def test_one_pair_has_no_interval() -> None:
    found = interval([0.9])

    assert found.ratio == pytest.approx(0.9)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(interval([]).ratio)


def test_a_pair_that_is_not_whole_is_left_out() -> None:
    assert pair_ratios([100.0, 90.0, 95.0], turns(LEGS, 2)[:3], "history") == [0.9]


def test_neighbours_of_one_leg_show_what_is_no_effect() -> None:
    assert null_ratios([100.0, 90.0, 99.0, 110.0, 121.0, 80.0], turns(LEGS, 3)) == pytest.approx([1.1, 1.1])
