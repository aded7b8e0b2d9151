"""Weights of a mixture as whole numbers in the same proportion."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

#: Most places after which the order of a mixture repeats: it is kept in memory.
MAX_PLACES = 100_000


def shares_of(weights: Sequence[float]) -> list[int]:
    """Convert ``[0.7, 0.3]`` to ``[7, 3]``: exact, as the numbers are written.

    Raises:
        ValueError: their sum is more than ``MAX_PLACES``.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = lcm(*(one.denominator for one in exact))
    shares = [int(one * whole) for one in exact]
    shares = [one // gcd(*shares) for one in shares]
    if sum(shares) > MAX_PLACES:
        raise ValueError(
            f"the weights {', '.join(f'{one:g}' for one in weights)} come out even after {sum(shares)} prompts only, "
            f"and may after {MAX_PLACES}: write rounder ones, such as 2 and 1 for two thirds and one"
        )
    return shares
