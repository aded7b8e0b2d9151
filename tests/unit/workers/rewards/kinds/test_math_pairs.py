"""The rewards of mathematics on pairs of answers that are equal, or different: ``math_pairs.txt`` beside this file."""

from pathlib import Path

import pytest

from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.kinds.registry import KINDS

_FILE = Path(__file__).with_name("math_pairs.txt")
_NUM_PAIRS = 280


def _pairs(separator: str) -> list[tuple[str, str]]:
    """(label, answer) of each line with the separator."""
    lines = [line for line in _FILE.read_text().splitlines() if not line.startswith("#")]
    found = [line.partition(separator)[::2] for line in lines if separator in line]
    return [(label.strip(), answer.strip()) for label, answer in found]


EQUAL, DIFFERENT = _pairs(" == "), _pairs(" != ")


def _verdict(reward: str, label: str, answer: str) -> float:
    text = f"<think>Hm.</think>So it is \\boxed{{{answer}}}."
    return float(KINDS[reward].judge(Question(text, label)))


@pytest.mark.parametrize(("label", "answer"), EQUAL)
def test_T11_an_equal_answer_in_another_notation_is_right(label: str, answer: str) -> None:
    assert _verdict("math", label, answer) == 1


@pytest.mark.parametrize(("label", "answer"), DIFFERENT)
def test_T11_a_different_answer_is_wrong(label: str, answer: str) -> None:
    assert _verdict("math", label, answer) == 0


def test_T11_deepscaler_judges_a_result_as_math_does() -> None:
    assert {_verdict("deepscaler", *pair) for pair in EQUAL[::5]} == {1}
    assert {_verdict("deepscaler", *pair) for pair in DIFFERENT[::5]} == {0}


def test_the_file_has_enough_different_pairs_of_each_kind() -> None:
    assert len(set(EQUAL)) >= _NUM_PAIRS
    assert len(set(DIFFERENT)) >= _NUM_PAIRS
    assert not set(EQUAL) & set(DIFFERENT)


@pytest.mark.parametrize("answer", ["e-6", "2ip"])
def test_T11_a_number_is_never_read_as_a_product_of_letters(answer: str) -> None:
    assert [_verdict("math", label, answer) for label in ("1e-6", "2\\pi")] == [0, 0]
    assert _verdict("math", answer, answer) == 1


def test_T11_an_answer_that_cannot_be_read_completely_equals_nothing_but_itself() -> None:
    for answer in ("5)", "5+", "5\\foo{", "5 6", "1.2.3", "\\frac{5}", "5^"):
        assert _verdict("math", "5", answer) == 0
        assert _verdict("math", "x+5", answer) == 0


def test_T11_units_that_are_unknown_are_ignored() -> None:
    assert _verdict("math", "12\\text{ furlongs}", "12\\text{ in}") == 1
    assert _verdict("math", "12\\text{ furlongs}", "13\\text{ furlongs}") == 0
