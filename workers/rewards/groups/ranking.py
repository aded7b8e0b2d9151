"""Group rewards of penstock's own: places among the answers to the same prompt."""

from collections import Counter
from collections.abc import Sequence

from penstock.protocol.records.sample import Sample


def ranks(samples: Sequence[Sample]) -> list[float]:
    """The share of the other answers that an answer beats by the reward that it got alone, a tie as half: 0 to 1.

    Their mean is 1/2 whatever the rewards are, so scale and shift of a score, of a judge say, do not matter. Of a group
    of one: 1/2.
    """
    return _beaten([sample.reward or 0.0 for sample in samples])


def shortest_right(samples: Sequence[Sample]) -> list[float]:
    """1 for the shortest right answer, 1/2 for the longest, those between by their places; wrong ones 0.

    Right is what alone got a reward above 0; its length are its drawn tokens. A tie shares the mean of its places.
    """
    right = [k for k, sample in enumerate(samples) if (sample.reward or 0.0) > 0]
    beaten = _beaten([-float(sum(samples[k].generated)) for k in right])
    found = [0.0] * len(samples)
    for k, share in zip(right, beaten, strict=True):
        found[k] = 0.5 + share / 2 if len(right) > 1 else 1.0
    return found


def _beaten(scores: Sequence[float]) -> list[float]:
    """Of each score the share of the others that are lower, those that are equal as half."""
    others = len(scores) - 1
    if others < 1:
        return [0.5] * len(scores)
    lower, below = {}, 0
    for score, many in sorted(Counter(scores).items()):
        lower[score] = below + (many - 1) / 2
        below += many
    return [lower[score] / others for score in scores]
