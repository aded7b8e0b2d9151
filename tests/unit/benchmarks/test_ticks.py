"""Tokens by the millisecond, and what an event cost of them."""

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.ticks import Ticks, account, drawn, in_bins, mean_shares

#: 100 ms at 10 tokens a millisecond, then 20 ms without one, 30 ms at half, 50 ms as before.
COUNTS = [10] * 100 + [0] * 20 + [5] * 30 + [10] * 50


def test_what_one_process_counts_another_reads(tmp_path: Path) -> None:
    file = tmp_path / "ticks"
    with closing(Ticks.make(file, 60.0)) as reading, closing(Ticks(file)) as counting:
        for tokens in (4, 0, 7):
            counting.add(tokens)
        assert sum(reading.between(0, reading.at(reading.began_s + 59.0))) == 11
        assert reading.began_s == counting.began_s
        assert reading.total() == 11


def test_what_comes_when_the_file_is_full_is_no_silent_loss(tmp_path: Path) -> None:
    with closing(Ticks.make(tmp_path / "ticks", 60.0)) as ticks:
        ticks.began_s -= 61.0
        with pytest.raises(IndexError):
            ticks.add(1)


def test_lost_is_the_rate_before_less_what_came() -> None:
    found = account(COUNTS, 100, pauses=[])

    assert found.rate == pytest.approx(10_000)
    assert (found.seconds, found.tokens) == pytest.approx((0.1, 650))
    assert found.lost == found.lost_outside == pytest.approx(20 * 10 + 30 * 5)
    assert found.lost_in_pause == found.pause_s == 0


def test_in_the_pause_and_outside_add_up() -> None:
    found = account(COUNTS, 100, pauses=[(105, 125)])

    assert found.pause_s == pytest.approx(0.02)
    assert found.lost_in_pause == pytest.approx(15 * 10 + 5 * 5)
    assert found.lost_outside == pytest.approx(5 * 10 + 25 * 5)
    assert found.lost == pytest.approx(account(COUNTS, 100, pauses=[]).lost)


def test_a_pause_counts_once_and_only_where_it_was_looked_at() -> None:
    once = account(COUNTS, 100, pauses=[(100, 120)])

    assert account(COUNTS, 100, pauses=[(90, 110), (105, 120), (110, 112)]) == once
    assert account(COUNTS, 100, pauses=[(0, 50), (100, 120), (200, 300)]) == once


def test_what_is_caught_up_is_not_lost() -> None:
    assert account([10] * 100 + [0] * 20 + [20] * 20, 100, pauses=[]).lost == pytest.approx(0)


@pytest.mark.parametrize("event", [0, 200, 201])
def test_an_event_without_a_before_or_a_behind_is_refused(event: int) -> None:
    with pytest.raises(ValueError, match="nothing before it, or behind it"):
        account(COUNTS, event, pauses=[])


@pytest.mark.parametrize("event", [100, 107, 149, 1])
def test_bins_begin_with_the_event_and_no_token_of_whole_ones_is_lost(event: int) -> None:
    before, after = in_bins(COUNTS, event, 50)

    assert len(before) == event // 50
    assert len(after) == (len(COUNTS) - event) // 50
    assert sum(before) == sum(COUNTS[event % 50 : event])
    assert sum(after) == sum(COUNTS[event : event + 50 * len(after)])
    assert after[0] == sum(COUNTS[event : event + 50])


def test_a_mean_of_events_goes_as_far_as_the_shortest() -> None:
    assert mean_shares([([0, 50, 100], 100.0), ([100, 150], 200.0)]) == pytest.approx([0.25, 0.625])


def test_a_picture_has_one_sign_for_a_bin() -> None:
    assert drawn([0.0, 0.5, 1.0, 1.25, 3.0, -1.0]) == " ▃▆██ "
