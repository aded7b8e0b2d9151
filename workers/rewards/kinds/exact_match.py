"""``exact_match``: the answer is the label."""

from penstock.workers.rewards.kinds.question import Question


def exact_match(question: Question) -> float:
    """Return 1 if the answer equals the label, without surrounding white space; else 0."""
    return float(question.text.strip() == question.label.strip())
