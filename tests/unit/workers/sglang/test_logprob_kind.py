"""What a server's logprobs at a very high temperature tell of their kind."""

import math
import random

import pytest

from penstock.workers.sglang.engine import NUM_TOKENS, TEMPERATURE, kind_of


def _log_softmax(logits: list[float], temperature: float) -> list[float]:
    scaled = [logit / temperature for logit in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(one - top) for one in scaled))
    return [one - total for one in scaled]


@pytest.mark.parametrize("spread", [0.78, 2.0, 8.0])
@pytest.mark.parametrize("vocab_size", [45, 2000, 30000])
def test_T6_both_kinds_are_told_apart_for_peaked_and_for_random_models(vocab_size: int, spread: float) -> None:
    """0.78 is the spread of the logits of a model of 1.5 B parameters as it is initialised."""
    rng = random.Random(vocab_size)
    logits = [rng.gauss(0.0, spread) for _ in range(vocab_size)]
    drawn = [rng.randrange(vocab_size) for _ in range(NUM_TOKENS)]
    scaled, original = _log_softmax(logits, TEMPERATURE), _log_softmax(logits, 1.0)
    assert kind_of([scaled[token] for token in drawn], vocab_size) == "scaled"
    assert kind_of([original[token] for token in drawn], vocab_size) == "original"
