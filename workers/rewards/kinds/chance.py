"""``random``: a reward of pure noise, which shows how a run reacts to noise."""

import random

from penstock.workers.rewards.kinds.question import Question


def chance(question: Question) -> int:
    """Return 0 or 1 with equal probability."""
    return random.randint(0, 1)
