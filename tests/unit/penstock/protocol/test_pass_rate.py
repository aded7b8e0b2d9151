"""What share of a group's answers is right, in a byte, and which prompts are skipped by such shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.pass_rate import PARTS, Skip, share_byte, share_of


@given(st.integers(1, 65536), st.data())
def test_only_none_and_all_are_kept_as_none_and_all(answers: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, answers))
    byte = share_byte(right, answers)
    assert 1 <= byte <= 255
    assert (share_of(byte) == 0, share_of(byte) == 1) == (right == 0, right == answers)
    assert abs(share_of(byte) - right / answers) <= 1 / PARTS


def test_a_group_without_answers_counts_for_nothing() -> None:
    assert share_byte(0, 0) == 0


@pytest.mark.parametrize(
    ("skip", "latest", "reason"),
    [
        (Skip(1, easy=1.0), [], ""),
        (Skip(1, easy=1.0), [1.0], "easy"),
        (Skip(1, easy=1.0), [253 / 254], ""),
        (Skip(1, easy=1.0), [0.0], ""),
        (Skip(1, easy=1.0), [1.0, 0.0], "easy"),
        (Skip(2, easy=1.0), [1.0], ""),
        (Skip(2, easy=1.0), [1.0, 0.5], ""),
        (Skip(2, easy=0.75), [1.0, 0.5], "easy"),
        (Skip(1, easy=1.0, hard=0.0), [0.0], "hard"),
        (Skip(1, hard=0.0), [1.0], ""),
        (Skip(1, hard=0.25), [64 / 254], "hard"),
        (Skip(1, hard=0.25), [65 / 254], ""),
        (Skip(1, hard=0.25), [63 / 254], "hard"),
        (Skip(1), [1.0], ""),
    ],
)
def test_a_prompt_is_skipped_by_the_mean_of_its_latest_groups_once_they_are_all_there(
    skip: Skip, latest: list[float], reason: str
) -> None:
    assert skip.reason(latest) == reason
