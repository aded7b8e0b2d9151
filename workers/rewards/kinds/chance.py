"""``random``: what a policy must not learn from; shows what a run makes of noise."""

import random

from penstock.workers.rewards.kinds.question import Question


def chance(question: Question) -> int:
    """0 or 1, each as likely as the other."""
    return random.randint(0, 1)
