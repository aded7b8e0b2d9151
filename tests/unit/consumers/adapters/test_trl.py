"""TRL's adapter without TRL: what it is asked for, what a run is given, and what comes back."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.adapters.trl import TrlRollouts
from penstock.errors import ConfigError


class Lane:
    """A run whose workers draw two tokens; ``teacher``: what its teacher says of them."""

    def __init__(self, teacher: list[float] | None) -> None:
        self.teacher, self.asked = teacher, list[Any]()

    def publish(self, model: Any, *, step: int) -> None:
        assert (model, step) == ("model", 3)

    def answer(self, requests: list[Any], timeout: float | None) -> list[list[RowArrays]]:
        self.asked += requests
        row: Any = SimpleNamespace(prompt_length=2, oldest=1, reward=1.0)
        drawn = np.array([0, 0, 1, 1], np.bool_)
        arrays = {"tokens": np.arange(4), "logprobs": np.zeros(4, np.float32), "versions": np.ones(4, np.int32)}
        taught = None if self.teacher is None else np.array([0, 0, *self.teacher], np.float32)
        made = RowArrays(row, 0, loss_mask=drawn, generated=drawn, lost=False, teacher_logprobs=taught, **arrays)
        return [[made] * one.n for one in requests]


def trainer(**args: Any) -> Any:
    def render(messages: Any, *, enable_thinking: bool, **_: Any) -> list[int]:
        return [1, 2] if enable_thinking else [1, 3]

    return SimpleNamespace(
        args=SimpleNamespace(temperature=1.0, **args),
        accelerator=SimpleNamespace(distributed_type="DistributedType.NO", unwrap_model=lambda model: "model"),
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=3),
        max_completion_length=8,
        chat_template_kwargs={"enable_thinking": False},
        processing_class=SimpleNamespace(apply_chat_template=render),
    )


def rollouts(label: Any = None, teacher: list[float] | None = None) -> tuple[TrlRollouts, Lane]:
    made: Any = TrlRollouts.__new__(TrlRollouts)
    lane = Lane(teacher)
    made.label, made.timeout, made._train, made._step = label, None, lane, None
    made._together = SimpleNamespace(share=lambda asked, answer: answer(asked()))
    return made, lane


PROMPTS = [[{"role": "user", "content": "a"}]] * 2


@pytest.mark.parametrize(
    ("label", "text", "value"), [(None, "", None), ("7", "7", None), (0, "0", 0), ({"a": 1}, '{"a": 1}', {"a": 1})]
)
def test_labels_reach_rewards_as_they_are(label: Any, text: str, value: Any) -> None:
    made, lane = rollouts(lambda prompt: label)
    made(PROMPTS, trainer())
    [asked] = lane.asked
    assert (asked.label, asked.label_value, asked.n, asked.prompt_ids) == (text, value, 2, [1, 3])


def test_a_teacher_reaches_the_functions_of_rewards() -> None:
    plain: Any = rollouts()[0](PROMPTS, trainer())
    taught: Any = rollouts(teacher=[-1, -2])[0](PROMPTS, trainer())
    assert [row["penstock_teacher_logprobs"] for row in taught] == [[-1, -2]] * 2
    assert plain[0].keys() == taught[0].keys() - {"penstock_teacher_logprobs"}


@pytest.mark.parametrize("name", ["generation_kwargs", "vllm_structured_outputs_regex"])
def test_what_is_for_engines_of_trls_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no effect"):
        rollouts()[0](PROMPTS, trainer(**{name: {"bad_words": ["x"]}}))
