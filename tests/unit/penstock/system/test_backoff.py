"""The wait before the next try."""

from penstock.system.stop import pause_s


def test_it_doubles_up_to_the_most() -> None:
    assert [pause_s(failures, 0.5, 3.0) for failures in (-1, 0, 1, 2, 3, 4, 5)] == [0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_many_failures_are_no_more_than_some() -> None:
    assert pause_s(10**6, 0.5, 3.0) == 3.0
