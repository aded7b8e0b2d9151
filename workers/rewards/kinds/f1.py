"""``f1``: the words that an answer shares with its label, as in SQuAD's evaluation.

Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (section 6.1).
"""

import re
import string
from collections import Counter
from typing import Any

from penstock.workers.rewards.kinds.question import Question, check_label

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: Answers that mean something else than a sentence that contains them.
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def f1(question: Question) -> dict[str, Any]:
    """Return ``score`` and ``f1``: the harmonic mean of ``precision`` and ``recall`` of the label's words, with their
    counts; ``em``: 1 if both have the same words in the same order. Case, punctuation and articles are ignored. With a
    list of labels the best match counts.

    Raises:
        ValueError: the label is too long.
    """
    raw = question.raw_label
    labels = [str(one) for one in raw] if isinstance(raw, list) and raw else [question.label]
    check_label("f1", labels)
    said = _Said(words(question.text))
    return max((said.held_against(words(label)) for label in labels), key=lambda found: found["score"])


def words(text: str) -> list[str]:
    """Return the words of a text that count."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


class _Said:
    """The words of an answer, counted once for all labels."""

    def __init__(self, said: list[str]) -> None:
        self._words, self._counts = said, Counter(said)
        self._is_verdict = " ".join(said) in _VERDICTS

    def held_against(self, wanted: list[str]) -> dict[str, Any]:
        """Compare with the words of a label. Takes time linear in ``wanted``."""
        precision, recall = self._shares(wanted)
        mean = 2 * precision * recall / (precision + recall) if precision else 0.0
        return {"score": mean, "f1": mean, "em": float(bool(wanted) and self._words == wanted),
                "precision": precision, "recall": recall}  # fmt: skip

    def _shares(self, wanted: list[str]) -> tuple[float, float]:
        is_verdict = self._is_verdict or " ".join(wanted) in _VERDICTS
        same = sum(min(count, self._counts[word]) for word, count in Counter(wanted).items())
        if not same or (is_verdict and self._words != wanted):
            return 0.0, 0.0
        return same / len(self._words), same / len(wanted)
