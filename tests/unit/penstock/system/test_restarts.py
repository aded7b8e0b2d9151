"""When a process that failed is started again, and when that is a crash loop."""

from penstock.system.restarts import Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def restarts(clock: Clock) -> Restarts:
    return Restarts(1.0, 6.0, 100.0, 5, clock)


def test_the_first_start_is_at_once_and_the_others_back_off() -> None:
    failing = restarts(Clock())
    waits = []
    for _ in range(6):
        failing.note_failure()
        waits.append(failing.wait_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_enough_failures_within_the_window_are_a_crash_loop_until_it_passes() -> None:
    clock = Clock()
    failing = restarts(clock)
    for _ in range(4):
        failing.note_failure()
        clock.now += 10.0
    assert not failing.is_loop
    failing.note_failure()
    assert failing.is_loop
    clock.now = 100.5
    assert not failing.is_loop, "the first failure is older than the window"
    clock.now = 1000.0
    failing.note_failure()
    assert failing.wait_s == 0.0


def test_an_engine_that_settled_begins_anew() -> None:
    failing = restarts(Clock())
    for _ in range(5):
        failing.note_failure()
    failing.note_settled()
    assert (failing.count, failing.is_loop) == (0, False)
