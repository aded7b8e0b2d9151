"""A fault counts where there was something to break; recovery ends with the next batch."""

import threading
import time

import pytest

from tests.chaos.nemesis.counting import Commits, Strike, count


def struck(number: int, at: float, *, in_flight: int = 4, error: str = "") -> Strike:
    return Strike(number, "kill:worker", at, at + 0.5, in_flight, error)


def test_a_fault_counts_with_work_in_flight_and_a_batch_since_the_one_before() -> None:
    faults = [struck(1, 10.0), struck(2, 20.0), struck(3, 21.0), struck(4, 30.0, in_flight=0), struck(5, 40.0)]

    found = count(faults, [9.0, 12.5, 24.0, 33.0])

    assert [one.counts for one in found] == [True, True, False, False, True]
    assert [one.recovery_s for one in found] == [2.5, 4.0, 3.0, 3.0, None]


def test_the_first_fault_needs_a_batch_before_it() -> None:
    assert [one.counts for one in count([struck(1, 10.0)], [11.0])] == [False]


def test_what_was_not_done_does_not_count_and_takes_no_batch_from_the_next() -> None:
    found = count([struck(1, 10.0, error="no request came"), struck(2, 11.0)], [9.0])

    assert [one.counts for one in found] == [False, True]


class Counter:
    """How many batches were committed, as a run would say."""

    def __init__(self) -> None:
        self.value: int | None = 3
        self.looked = threading.Semaphore(0)

    def __call__(self) -> int | None:
        self.looked.release()
        return self.value

    def say(self, value: int | None) -> None:
        """Say it for as long as it takes to be heard."""
        self.value = value
        while self.looked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.looked.acquire(timeout=30)


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_commits_are_noted_also_after_a_rewind_and_a_time_of_silence(counter: Counter) -> None:
    commits = Commits(counter, look_s=0.001).start()
    began = time.monotonic()
    counter.say(4)
    assert commits.wait_for_one(began, 30)
    assert len(commits.times) == 2, "those before it began are one"

    counter.say(None)
    counter.say(2)
    assert len(commits.times) == 2, "what was taken away is no batch"

    counter.say(3)
    assert len(commits.times) == 3
    assert not commits.wait_for_one(time.monotonic(), 0.01)
    commits.end()
