"""Whatever an answer is, a quick reward by name gives a finite number, or says what is wrong with its label."""

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.rewards.kinds.kind import Kind, Question
from penstock.workers.rewards.kinds.math_notation import exact_value, read_notation
from penstock.workers.rewards.kinds.registry import NAMES, is_quick, is_remote, kind_of

QUICK = [name for name in NAMES if is_quick(name) and not is_remote(name)]
#: Pieces that a reward looks for, and what is none of its business.
PIECES = [
    "\\boxed{", "\\boxed", "{", "}", "\\", "$", "Answer:", "answer is ", "</think>", "###Response", "9" * 400, "1e999",
    "\\sqrt", "^", "_", "(", ")", "/", "1.5e3 ",
    ",", "\\frac", "\\text{", "\x00", "\x1b[2J", "\ud800", "\u202e", "ſ", "²", "٣", "=", "\n", " ", "A", "yes",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=30).map("".join)
LONG = ["9", "{", "\\boxed{", "answer ", "Answer:\n", "A ", "the ", "$", "</think>", " ", "\ud800"]
MAX_S = 20.0


def judged(kind: Kind, question: Question) -> Any:
    """What it gives; 0 where it says that the label is not one for it."""
    try:
        return kind.judge(question)
    except ValueError as exc:
        if "label" not in str(exc):
            raise
        return 0.0


def number(name: str, question: Question) -> float:
    kind = kind_of(name)
    assert kind is not None
    found = judged(kind, question)
    return float(found["score"] if isinstance(found, dict) else found)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXTS, label=TEXTS, choices=st.one_of(st.lists(TEXTS, max_size=4), st.none(), st.integers(), TEXTS))
def test_T11_a_hostile_answer_is_a_number_or_a_named_failure(text: str, label: str, choices: object) -> None:
    question = Question(text, label, label, {"choices": choices, "valid_letters": choices, "correct_letter": choices})
    for name in QUICK:
        assert math.isfinite(number(name, question))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_any_text_has_a_notation(text: str) -> None:
    exact_value(read_notation(text).text)


@pytest.mark.parametrize("piece", LONG, ids=repr)
def test_a_megabyte_takes_time_by_its_length_alone(piece: str) -> None:
    question = Question(piece * (1_000_000 // len(piece)), "5", "5")
    began = time.process_time()
    for name in QUICK:
        assert math.isfinite(number(name, question))
    assert time.process_time() - began < MAX_S
