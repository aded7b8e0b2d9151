"""What evaluations are told of an answer beside its reward."""

from typing import Any

import pytest

from penstock.config import DataConfig, DatasetConfig
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.jobs.held_job import MAX_CATEGORY, add_eval_info, result_of

HELD = [DatasetConfig(name="held", path="h.jsonl", metadata_key="about", category_key="kind")]


@pytest.mark.parametrize(
    ("text", "pred"),
    [
        ("It is \\boxed{5}.", "5"),
        ("\\boxed{1} or rather \\boxed{ 2\n 3 }", "2 3"),
        ("  five\n", "five"),
        ("", ""),
        ("word " * 100, ""),
        ("\ud800", "\\ud800"),
    ],
)
def test_an_answer_comes_to_its_last_box_or_is_short(text: str, pred: str) -> None:
    assert result_of(text) == pred


def noted(metadata: dict[str, Any], *, n: int = 2, lane: str = "eval", dataset: str = "held", **said: Any) -> Any:
    sample = Sample(Job(f"{dataset}/1/0", n, lane=lane, metadata=metadata), 0, text="\\boxed{5}", reward_info=said)
    add_eval_info(sample, HELD)
    return sample.reward_info


def test_a_held_out_sample_has_what_it_comes_to_and_the_category_of_its_prompt() -> None:
    assert noted({"kind": "sum"}) == {"pred": "5", "category": "sum"}
    assert noted({"kind": 3}, n=1) == {"category": "3"}
    assert noted({"kind": ["sum"]}) == noted({}) == noted({"kind": " "}) == {"pred": "5"}
    assert noted({"kind": "x" * 999}, n=1) == {"category": "x" * MAX_CATEGORY}
    assert noted({}, pred="its own") == {"pred": "its own"}
    assert noted({"kind": "sum"}, lane="train") == {}
    assert noted({"kind": "sum"}, dataset="other") == {"pred": "5"}


def test_a_category_is_an_entry_of_the_metadata_of_held_out_prompts() -> None:
    with pytest.raises(ValueError, match="set metadata_key to the column"):
        DatasetConfig(name="held", path="h.jsonl", category_key="kind")
    with pytest.raises(ValueError, match="category_key of training dataset"):
        DataConfig(train=HELD)
