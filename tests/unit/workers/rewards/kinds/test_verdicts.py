"""Verdicts of rewards by name, against the table of cases."""

import importlib
import json
from typing import Any

import pytest

from penstock.config.hooks import REWARDS
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.kinds.registry import KINDS, kind_of
from tests.unit.workers.rewards.kinds.cases import INSTRUCTIONS, MATHS, QUICK, RAISES, Case
from tests.unit.workers.rewards.kinds.punkt import make_punkt


@pytest.fixture(scope="module", autouse=True)
def _sentences(tmp_path_factory: pytest.TempPathFactory) -> None:
    """nltk finds them with the least data, where it has none here."""
    importlib.import_module("nltk").data.path.append(str(make_punkt(tmp_path_factory.mktemp("nltk"))))


def question(case: Case) -> Question:
    label, value = (case.label, None) if isinstance(case.label, str) else (json.dumps(case.label), case.label)
    job = Job("maths/0/0", 1, label=label, label_value=value, metadata=case.metadata)
    return Question.of(Sample(job, 0, text=case.text))


def verdict(case: Case) -> float | str:
    kind = kind_of(case.reward)
    assert kind is not None
    try:
        found: Any = kind.judge(question(case))
    except ValueError:
        return RAISES
    return float(found["score"] if isinstance(found, dict) else found)


@pytest.mark.parametrize("case", [*MATHS, *QUICK, *INSTRUCTIONS], ids=lambda case: f"{case.reward}-{case.text[:20]}")
def test_T11_verdicts_by_name_are_those_of_the_table(case: Case) -> None:
    assert verdict(case) == case.verdict


def test_each_verdict_that_is_not_slimes_has_its_reason() -> None:
    cases = [*MATHS, *QUICK, *INSTRUCTIONS]
    assert {one.reward for one in cases} | {"random", "math_verify", "remote_rm", "code"} >= set(REWARDS)
    assert all(bool(one.why) == (one.slime is not None) and one.slime != one.verdict for one in cases)


def test_what_dapo_and_f1_say_beside_their_number() -> None:
    assert KINDS["dapo"].judge(Question("Answer: 3", "4")) == {"score": -1.0, "acc": False, "pred": "3"}
    assert KINDS["f1"].judge(Question("the red cat", "red dog")) == {
        "score": 0.5, "f1": 0.5, "em": 0.0, "precision": 0.5, "recall": 0.5
    }  # fmt: skip
    assert KINDS["f1"].judge(Question("A cat", "cat"))["em"] == 1.0


def test_random_is_0_or_1() -> None:
    assert {KINDS["random"].judge(Question("", "")) for _ in range(100)} == {0, 1}
