"""``f1``: the words that an answer shares with its label, as SQuAD's evaluation counts them.

Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (section 6.1).
"""

import re
import string
from collections import Counter
from typing import Any

from workers.rewards.kinds.question import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: Answers that share a word with a sentence and yet say another thing.
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def f1(question: Question) -> dict[str, Any]:
    """``score`` and ``f1``: the harmonic mean of ``precision`` and ``recall`` of the label's words, each as often as
    it is there; ``em``: 1 where both are the same words in the same order. Case, punctuation and articles do not count.
    Of a label that is a list the entry counts that is met best.
    """
    said, raw = words(question.text), question.raw_label
    labels = raw if isinstance(raw, list) and raw else [question.label]
    return max((_held_against(said, words(str(label))) for label in labels), key=lambda found: found["score"])


def _held_against(said: list[str], wanted: list[str]) -> dict[str, Any]:
    precision, recall = _shares(said, wanted)
    mean = 2 * precision * recall / (precision + recall) if precision else 0.0
    return {"score": mean, "f1": mean, "em": float(bool(wanted) and said == wanted),
            "precision": precision, "recall": recall}  # fmt: skip


def words(text: str) -> list[str]:
    """The words that count."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _shares(said: list[str], wanted: list[str]) -> tuple[float, float]:
    is_verdict = not _VERDICTS.isdisjoint({" ".join(said), " ".join(wanted)})
    same = (Counter(said) & Counter(wanted)).total()
    if not same or (is_verdict and said != wanted):
        return 0.0, 0.0
    return same / len(said), same / len(wanted)
