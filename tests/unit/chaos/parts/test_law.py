"""The law of the fake policy is a policy: its probabilities are some, and are its own in every version."""

import math
import random

from tests.chaos.parts import law

PROMPT = [2, 3, 4]


def test_the_probabilities_of_all_tokens_are_one_together() -> None:
    seed = law.seed_of(["a"], 1)

    for temperature in (1.0, 0.7, 1000.0):
        whole = sum(math.exp(law.logprob(seed, PROMPT, token, temperature)) for token in range(law.VOCABULARY))
        assert math.isclose(whole, 1.0)


def test_tokens_are_drawn_as_often_as_the_law_says() -> None:
    seed, rng, draws = law.seed_of(["a"], 1), random.Random(0), 40_000
    counts = [0] * law.VOCABULARY
    for _ in range(draws):
        token, logprob = law.draw(seed, PROMPT, rng.random())
        assert logprob == law.logprob(seed, PROMPT, token)
        counts[token] += 1

    for token, count in enumerate(counts):
        expected = draws * math.exp(law.logprob(seed, PROMPT, token))
        assert abs(count - expected) < 6 * math.sqrt(expected), token


def test_another_version_another_batch_and_another_prefix_are_another_law() -> None:
    laws = [law.seed_of(["a"], 1), law.seed_of(["a"], 2), law.seed_of(["a", "b"], 1)]
    laws_of = {tuple(law.logprob(seed, PROMPT, token) for token in range(law.VOCABULARY)) for seed in laws}
    assert len(laws_of) == 3
    assert law.logprob(laws[0], PROMPT, 5) != law.logprob(laws[0], [3, 2, 4], 5)


def test_a_version_that_nobody_loaded_draws_nothing() -> None:
    oracle = law.Oracle({1: law.seed_of(["a"], 1)})

    assert oracle(1, [*PROMPT, 5], 3) == law.logprob(law.seed_of(["a"], 1), PROMPT, 5)
    assert oracle(2, [*PROMPT, 5], 3) == -math.inf
