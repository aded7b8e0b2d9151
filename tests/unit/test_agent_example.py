"""The example of an agent: the scores that it reports, and the conversations that its model was shown."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.unit.example_parts import load


class Policy:
    """A client of OpenAI whose answers are given."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.chat = SimpleNamespace(completions=self)

    def with_options(self, api_key: str) -> "Policy":
        assert api_key == "key"
        return self

    async def create(self, model: str, messages: list[dict[str, str]]) -> Any:
        self.asked.append([one["content"] for one in messages])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.answers.pop(0)))])


@pytest.mark.parametrize(
    ("answers", "score"), [(["123"], 1.0), (["321", "123"], 0.5), (["321", "213"], 0.0), (["", "123"], 0.5)]
)
async def test_the_second_answer_is_worth_half(answers: list[str], score: float) -> None:
    policy = Policy(*answers)

    assert await load("agent/agent.py").play(policy, {"key": "key", "prompt": "312=", "label": "123"}) == score
    assert policy.asked == [["312="], ["312=", answers[0], "312="]][: len(answers)]


def test_a_demonstration_is_what_the_template_makes_of_a_conversation() -> None:
    prepare = load("digits/prepare.py")
    tokenizer: PreTrainedTokenizerBase = prepare.make_tokenizer()
    text = prepare.demonstration(random.Random(0), 0.5, 2)
    prompt, first, second = text[:6], text[6:11], text[22:27]
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": first},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": second},
    ]

    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    ids = tokenizer.encode(text)
    assert len(ids) == 4 * prepare.PART
    assert [at for at, token in enumerate(ids) if token == tokenizer.eos_token_id] == [11, 23]
