"""The law of the fake policy: with which probability a version draws a token behind those before it. Pure.

Weights are 32 bytes, the *seed* of the law; versions have other ones. The distribution of the next token follows from
the seed and from the last tokens, so a token that is ascribed to another version, that stands one place off, or whose
prefix is another one, has another log-probability.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate

#: As tests/tiny_model.py has them: padding, end, and one token per character.
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz=+-<>?."
PAD, EOS = 0, 1
VOCABULARY = 2 + len(ALPHABET)
#: Tokens that the next one depends on.
CONTEXT = 3
#: Bytes of a seed.
SEED_BYTES = 32

#: Seed of weights that nobody has loaded yet.
UNTRAINED = bytes(SEED_BYTES)


def seed_of(batches: Sequence[str], version: int) -> bytes:
    """The weights of a trainer that has trained these batches (digests), as it publishes them under a number."""
    return blake2b(f"{version}:{','.join(batches)}".encode(), digest_size=SEED_BYTES).digest()


def weights(seed: bytes, tokens: Sequence[int]) -> tuple[int, ...]:
    """[V] relative weights of the token behind ``tokens``, at temperature 1."""
    return _weights(seed, tuple(tokens[-CONTEXT:]))


@lru_cache(maxsize=65536)
def _weights(seed: bytes, context: tuple[int, ...]) -> tuple[int, ...]:
    noise = blake2b(repr(context).encode(), key=seed, digest_size=VOCABULARY).digest()
    return tuple(1 + byte for byte in noise)


def logprob(seed: bytes, tokens: Sequence[int], token: int, temperature: float = 1.0) -> float:
    """Log-probability of ``token`` behind ``tokens``."""
    heights = _tempered(weights(seed, tokens), temperature)
    return math.log(heights[token] / sum(heights))


def draw(seed: bytes, tokens: Sequence[int], at: float, temperature: float = 1.0) -> tuple[int, float]:
    """A token behind ``tokens``, and its log-probability.

    Args:
        at: in [0, 1), drawn uniformly by the caller.
    """
    heights = _tempered(weights(seed, tokens), temperature)
    sums = list(accumulate(heights))
    token = min(bisect_right(sums, at * sums[-1]), len(sums) - 1)
    return token, math.log(heights[token] / sums[-1])


def _tempered(heights: Sequence[int], temperature: float) -> Sequence[float]:
    if temperature == 1.0:
        return heights
    if temperature < 1e-6:  # greedy
        highest = max(heights)
        best = heights.index(highest)
        return [1.0 if token == best else 1e-30 for token in range(len(heights))]
    return [float((height / 256) ** (1 / temperature)) for height in heights]


class Oracle:
    """The laws of all versions of a run, as a checker asks for them."""

    def __init__(self, seeds: Mapping[int, bytes]) -> None:
        self._seeds = seeds

    def __call__(self, version: int, tokens: Sequence[int], position: int) -> float:
        """Log-probability with which ``version`` draws ``tokens[position]``; -inf of a version that nobody loaded."""
        seed = self._seeds.get(version)
        if seed is None:
            return -math.inf
        return logprob(seed, tokens[max(0, position - CONTEXT) : position], tokens[position])
