"""Checks and verdicts as JSON: what goes in comes out, and nothing else is read."""

import json

import pytest

from penstock.errors import ProtocolError, RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.wire import Verdict, sample_from_json, sample_to_json


def made() -> Sample:
    sample = Sample(Job("d/0/1", 2, prompt="é", label="2", metadata={"a": [1, None, 0.5]}), 1)
    sample.append([1])
    sample.append([2, 3], version=4, logprobs=[-0.1, -0.2])
    sample.text, sample.turns, sample.status, sample.prompt_length = "ü\n", ["ü\n"], "completed", 1
    return sample


def test_a_sample_arrives_as_it_was_but_for_its_logprobs() -> None:
    sent = made()
    sample = sample_from_json(sample_to_json(sent, 10_000))
    sent.logprobs = []
    assert sample == sent


def test_a_sample_over_the_bound_is_refused() -> None:
    size = len(sample_to_json(made(), 10_000))
    sample_to_json(made(), size)
    with pytest.raises(RewardError, match=rf"{size} bytes as JSON, more than {size - 1}"):
        sample_to_json(made(), size - 1)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", "[" * 100_000, "{}", '{"job": 3}', '{"job": {"id": "d/0/1", "n": 2, "exec": "x"}}',
     '{"job": {"id": "d/0/1", "n": 2}, "k": 1}'],
)  # fmt: skip
def test_what_is_no_sample_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        sample_from_json(text)


@pytest.mark.parametrize("change", [{"text": 3}, {"tokens": "12"}, {"more": 1}])
def test_a_sample_with_a_wrong_field_is_refused(change: dict[str, object]) -> None:
    value = json.loads(sample_to_json(made(), 10_000)) | change
    with pytest.raises(ProtocolError, match=next(iter(change))):
        sample_from_json(json.dumps(value))


def test_a_verdict_arrives_as_it_was() -> None:
    verdict = Verdict(0.5, {"parts": [1, float("inf")]}, "", "", "")
    assert Verdict.from_json(verdict.to_json().encode()) == verdict
    for text in (b"[]", b'{"more": 1}', b"\xff", verdict.to_json().encode().replace(b"0.5", b'"0.5"')):
        with pytest.raises(ProtocolError):
            Verdict.from_json(text)
