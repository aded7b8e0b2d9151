"""How long the recorder rests: not while cores are free."""

import pytest

from penstock.consumers.history.recorder import MAX_REST_S, SHARE, Pace, ran


def rest_s(cpu_s: float, waited_s: float) -> float:
    """After so much work, of which it waited so long for a core."""
    told = iter([(7.0, 3.0), (7.0 + cpu_s, 3.0 + waited_s)])
    return Pace(lambda: next(told)).rest_s()


def test_where_cores_are_free_it_goes_on() -> None:
    assert rest_s(0.1, 0.0) == rest_s(0.1, 0.01) == rest_s(0.0, 0.0) == 0.0


def test_where_others_wait_for_them_it_takes_a_small_share() -> None:
    assert rest_s(0.1, 0.2) == pytest.approx(0.1 * (1 - SHARE) / SHARE)
    assert rest_s(9.0, 9.0) == MAX_REST_S


def test_each_rest_is_for_the_work_since_the_last() -> None:
    told = iter([(0.0, 0.0), (0.1, 0.2), (0.2, 0.2)])
    pace = Pace(lambda: next(told))
    assert pace.rest_s() > 0.0
    assert pace.rest_s() == 0.0, "it did not wait this time"


def test_a_clock_that_goes_back_is_no_negative_rest() -> None:
    assert rest_s(-0.1, 0.2) == 0.0


def test_the_kernel_says_how_long_it_ran() -> None:
    (cpu_s, waited_s), after = ran(), ran()
    assert 0 <= cpu_s <= after[0]
    assert 0 <= waited_s <= after[1]
