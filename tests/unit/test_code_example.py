"""Data of the code example: its labels are tests that each right program passes, and no other."""

import json
import random
from types import ModuleType

import pytest

from penstock.workers.rewards.kinds.code_tests import is_right, read_tests
from tests.unit.example_parts import load


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load("code/prepare.py")


def test_only_the_right_operator_passes_the_tests_of_a_prompt(prepare: ModuleType) -> None:
    train, heldout = prepare.make_prompts(prepare.Sizes())
    assert (len(set(train)), len(set(heldout)), set(train) & set(heldout)) == (2000, 64, set())
    for prompt in heldout:
        word, number = prompt.rstrip("=").split()
        found = read_tests(json.dumps(prepare.label_of(prompt)))
        for other, (sign, _) in prepare.OPERATORS.items():
            # The example's own text, not an answer's.
            function = eval(found.program(f"x{sign}{number}").partition("=")[2])
            passes = [
                is_right(test, json.dumps(function(*test.arguments)).encode(), 0.0) and test.function == "f"
                for test in found.tests
            ]
            assert all(passes) is (other == word), (prompt, other)


def test_demonstrations_have_the_right_operator_sometimes(prepare: ModuleType) -> None:
    rng = random.Random(0)
    shown = [prepare.demonstration(rng, 0.3).split("=") for _ in range(2000)]
    right = sum(prepare.OPERATORS[prompt.split()[0]][0] == program[1] for prompt, program in shown) / len(shown)
    assert 0.26 < right < 0.34
    assert len({len(prompt) + len(program) for prompt, program in shown}) == 1
    assert not any(prepare.is_heldout(f"{prompt}=") for prompt, _ in shown)
