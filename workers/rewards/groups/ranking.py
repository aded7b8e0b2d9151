"""Built-in group rewards: ranks among the answers to the same prompt."""

from collections import Counter
from collections.abc import Sequence

from penstock.protocol.records.sample import Sample


def ranks(samples: Sequence[Sample]) -> list[float]:
    """Return for each answer the share of the others with a lower individual reward, ties as half: 0 to 1.

    The mean is always 1/2, so scale and shift of a score, of a judge for instance, do not matter. 1/2 for a group of
    one.
    """
    return _beaten([sample.reward or 0.0 for sample in samples])


def shortest_right(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for the shortest correct answer, 1/2 for the longest, linear by rank in between; 0 for wrong ones.

    An answer is correct if its individual reward is above 0; its length is its number of generated tokens. Ties share
    the mean of their ranks.
    """
    right = [k for k, sample in enumerate(samples) if (sample.reward or 0.0) > 0]
    beaten = _beaten([-float(sum(samples[k].generated)) for k in right])
    found = [0.0] * len(samples)
    for k, share in zip(right, beaten, strict=True):
        found[k] = 0.5 + share / 2 if len(right) > 1 else 1.0
    return found


def _beaten(scores: Sequence[float]) -> list[float]:
    """Return for each score the share of the others that are lower, equal ones as half."""
    others = len(scores) - 1
    if others < 1:
        return [0.5] * len(scores)
    lower, below = {}, 0
    for score, many in sorted(Counter(scores).items()):
        lower[score] = below + (many - 1) / 2
        below += many
    return [lower[score] / others for score in scores]
