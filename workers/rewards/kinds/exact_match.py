"""``exact_match``: the answer is the label."""

from penstock.workers.rewards.kinds.question import Question


def exact_match(question: Question) -> float:
    """1 where the answer is the label, white space around both left out; else 0."""
    return float(question.text.strip() == question.label.strip())
