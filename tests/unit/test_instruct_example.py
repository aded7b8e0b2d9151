"""The example of a real language model: what its rewards accept, its prompts, and the order of its weights."""

from types import ModuleType

import pytest
import torch

from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.unit.example_parts import load


@pytest.fixture(scope="module")
def rewards() -> ModuleType:
    return load("instruct/rewards.py")


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load("instruct/prepare.py")


def answer(label: str, text: str, logprob: float = -1.0, reason: str = "stop") -> Sample:
    sample = Sample(Job("instructions/0/0", 1, prompt="", label=label), 0, text=text)
    sample.append([1], version=1, logprobs=[logprob])
    sample.finish_reason = reason
    return sample


BEES = "Bees live in large hives. They make honey from flowers."


@pytest.mark.parametrize(
    ("label", "text", "score"),
    [
        ("sentences 2", BEES, 1.0),
        ("sentences 3", BEES, 0.0),
        ("sentences 2", "Bees live in large hives and make some honey. Yes.", 0.0),
        ("sentences 2", "Bees live in large hives.\nThey make honey from flowers.", 0.0),
        ("words 10", BEES, 1.0),
        ("words 9", BEES, 0.0),
        ("words 9", "Bees make honey.", 0.0),
        ("words 20", BEES[:-1], 0.0),
        ("commas 0", BEES, 1.0),
        ("commas 0", "Bees, which live in large hives, make some honey.", 0.0),
    ],
)
def test_an_answer_scores_if_it_follows_its_instruction(
    rewards: ModuleType, label: str, text: str, score: float
) -> None:
    assert rewards.follows(answer(label, text)) == {"score": score, "logprob": -1.0}


def test_word_salad_and_answers_without_an_end_score_nothing(rewards: ModuleType) -> None:
    assert rewards.follows(answer("sentences 2", BEES, logprob=-3.0))["score"] == 0.0
    assert rewards.follows(answer("sentences 2", BEES, reason="length"))["score"] == 0.0


def test_held_out_prompts_are_about_other_topics(prepare: ModuleType) -> None:
    train = list(prepare.prompts(prepare.TRAIN_TOPICS, prepare.TRAIN_NUMBERS))
    held_out = list(prepare.prompts(prepare.HELDOUT_TOPICS, prepare.HELDOUT_NUMBERS))
    assert not set(prepare.TRAIN_TOPICS) & set(prepare.HELDOUT_TOPICS)
    assert len(held_out) >= 300
    assert {one["label"].split()[0] for one in train} == {one["label"].split()[0] for one in held_out}


def test_halves_of_a_head_are_put_one_after_the_other(prepare: ModuleType) -> None:
    rows = torch.arange(16).view(8, 2)  # two heads of four rows, as GGUF alternates them
    assert prepare.halves(rows, 2)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
