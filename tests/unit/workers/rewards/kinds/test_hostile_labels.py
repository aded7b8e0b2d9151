"""Whatever a label is, a quick reward by name reads it in little time, or says that it is too long."""

import time
from typing import Any

import pytest

from penstock.workers.rewards.kinds.dapo import MAX_LABEL as MAX_NUMBER
from penstock.workers.rewards.kinds.kind import MAX_LABEL, Question
from penstock.workers.rewards.kinds.registry import kind_of

MAX_S = 20.0
TOO_LONG = r"reward (dapo|f1|gpqa): the label has [0-9,]+ characters, and at most [0-9,]+ are read: shorten it"


def judged(name: str, text: str, label: Any, **metadata: Any) -> Any:
    kind = kind_of(name)
    assert kind is not None
    return kind.judge(Question(text, label if isinstance(label, str) else "", label, metadata))


@pytest.mark.parametrize("name", ["dapo", "boxed_dapo", "f1", "boxed_f1", "gpqa", "boxed_gpqa"])
@pytest.mark.parametrize("piece", ["\\boxed{", "\\text{", "$", "a ", "w", "Answer: "])
def test_a_long_label_is_refused_before_it_is_read(name: str, piece: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=TOO_LONG):
        judged(name, "Answer: 7", piece * 200_000)
    assert time.process_time() - began < MAX_S


@pytest.mark.parametrize(
    ("name", "label", "metadata"),
    [
        ("f1", ["w"] * MAX_LABEL, {}),
        ("gpqa", "A", {"choices": ["A " * MAX_LABEL]}),
        ("gpqa", "A", {"correct_answer": "A " * MAX_LABEL}),
    ],
)
def test_all_that_counts_as_a_label_is_counted(name: str, label: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=TOO_LONG):
        judged(name, "A", label, **metadata)


def test_a_label_of_usual_length_is_read() -> None:
    assert judged("dapo", "Answer: 7", "x" * (MAX_NUMBER - 3) + "=7")["score"] == 1.0
    assert judged("f1", "w " * 1000, ["other", "w " * 30_000])["recall"] == pytest.approx(1 / 30)
    assert judged("gpqa", "B", "right", choices=["wrong " * 5_000, "right"]) == 1.0


def test_the_words_of_an_answer_are_counted_once_for_all_labels() -> None:
    labels = [f"w{number}" for number in range(9_000)]
    answer = " ".join(f"w{number}" for number in range(100_000))
    began = time.process_time()
    assert judged("f1", answer, labels)["precision"] == 1 / 100_000
    assert time.process_time() - began < MAX_S
