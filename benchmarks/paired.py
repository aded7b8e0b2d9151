"""Ratios of windows that lay beside each other, and how far they resolve."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Student's t for a two-sided 95 % interval, by degrees of freedom 1 to 30; beyond, the normal distribution's.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean ratio and its 95 % interval; nan where there are too few to tell."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of ratios and its 95 % interval, by Student's t of their logarithms.

    One ratio has no interval: nan.
    """
    if not ratios:
        return Interval(math.nan, math.nan, math.nan)
    logs = [math.log(ratio) for ratio in ratios]
    mean, low, high = mean_interval(logs)
    return Interval(
        math.exp(mean), math.nan if low is None else math.exp(low), math.nan if high is None else math.exp(high)
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean of one value or more and its 95 % interval, by Student's t. One value has no interval: None."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _Z95
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def turns(legs: tuple[str, str], pairs: int) -> list[str]:
    """Legs in turns A B, B A, A B, ...: neither is always the first, and what drifts evenly weighs on both alike."""
    return [leg for pair in range(pairs) for leg in (legs if pair % 2 == 0 else legs[::-1])]


def pair_ratios(rates: Sequence[float], named: Sequence[str], leg: str) -> list[float]:
    """Rate of ``leg`` over that of the other, of each whole pair of ``turns``; ``named``: the leg of each rate."""
    whole = range(0, len(rates) - len(rates) % 2, 2)
    return [rates[i] / rates[i + 1] if named[i] == leg else rates[i + 1] / rates[i] for i in whole]


def null_ratios(rates: Sequence[float], named: Sequence[str]) -> list[float]:
    """The later over the earlier of neighbours of one leg: what this shows where nothing was changed."""
    return [rates[i + 1] / rates[i] for i in range(1, len(rates) - 1, 2) if named[i] == named[i + 1]]
