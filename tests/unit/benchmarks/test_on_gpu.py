"""Parts of a machine that is rented for minutes: what is asked for, and what stands still."""

import math
import signal
import time

import pytest

from benchmarks.on_gpu import OutOfTime, Part, broken_off


def test_a_part_is_a_shape_a_name_and_how_long_it_may_take() -> None:
    assert Part.of("1.5b/timeline:290") == Part("1.5b", "timeline", 290.0)
    assert Part.of("tiny/tokens") == Part("tiny", "tokens", math.inf)


@pytest.mark.parametrize("text", ["timeline", "2b/timeline", "tiny/nothing", "tiny/publish:soon", ""])
def test_what_is_no_part_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(SystemExit, match="is no part: write SHAPE/NAME"):
        Part.of(text)


def stand_still(at_s: float) -> None:
    with broken_off(at_s, "a part"):
        time.sleep(60)


def test_what_stands_still_is_broken_off_and_the_time_of_the_block_around_it_runs_on() -> None:
    began_s = time.monotonic()
    with broken_off(began_s + 3600, "its engine"):
        with pytest.raises(OutOfTime, match="a part did not end in time"):
            stand_still(began_s)
        assert time.monotonic() - began_s < 60
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left_s <= began_s + 3601 - time.monotonic()


def test_what_ends_in_time_leaves_nothing_behind() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with broken_off(time.monotonic() + 7200, "a part"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 3600
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 3600, "that of the tests' own limit, if they have one"
