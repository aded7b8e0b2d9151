"""Built-in rewards by name. A record may name these; none is imported because of it."""

import random
import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

from penstock.config.hooks import BOXED, REMOTE, REWARDS
from penstock.system.extras import check_installed
from penstock.workers.rewards.kinds import ifbench, math_verify
from penstock.workers.rewards.kinds.code import code
from penstock.workers.rewards.kinds.code import read_label as read_code_label
from penstock.workers.rewards.kinds.dapo import dapo
from penstock.workers.rewards.kinds.gpqa import gpqa
from penstock.workers.rewards.kinds.kind import Kind, Question, check_label
from penstock.workers.rewards.kinds.math_answers import deepscaler, math, read_label

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: Answers that mean something else than a sentence that contains them.
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def f1(question: Question) -> dict[str, Any]:
    """Compare the words of an answer with its label, as in SQuAD's evaluation.

    Returns ``score`` and ``f1``: the harmonic mean of ``precision`` and ``recall`` of the label's words, with their
    counts; ``em``: 1 if both have the same words in the same order. Case, punctuation and articles are ignored. With a
    list of labels the best match counts.

    Source: Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (section 6.1).

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


def exact_match(question: Question) -> float:
    """Return 1 if the answer equals the label, without surrounding white space; else 0."""
    return float(question.text.strip() == question.label.strip())


def chance(question: Question) -> int:
    """Return 0 or 1 with equal probability."""
    return random.randint(0, 1)


_BOX = "\\boxed{{}}"

#: By name in the configuration. A new name must also be added to ``REWARDS`` in penstock/config/hooks.py, which a
#: test compares with this table; everything else follows from the two.
KINDS: dict[str, Kind] = {
    "exact_match": Kind(exact_match),
    "math_verify": Kind(math_verify.judge, True, math_verify.read_label, boxed=_BOX, package="math_verify"),
    "math": Kind(math, True, read_label, boxed=_BOX, package="math_verify"),
    "deepscaler": Kind(deepscaler, True, read_label, boxed=f"</think>{_BOX}", package="math_verify"),
    "dapo": Kind(dapo, boxed="Answer: {}"),
    "f1": Kind(f1),
    "gpqa": Kind(gpqa),
    "ifbench": Kind(ifbench.ifbench, True, package=ifbench.PACKAGE, load=ifbench.load, reads_metadata=True),
    "code": Kind(code, True, read_code_label, needs_jail=True),
    "random": Kind(chance),
}

#: All names, with their ``boxed_`` variants.
NAMES = (*REWARDS, *(BOXED + name for name in REWARDS))


def kind_of(name: str) -> Kind | None:
    """Return the built-in reward of that name, or None."""
    if found := KINDS.get(name):
        return found
    boxed = KINDS.get(name.removeprefix(BOXED)) if name.startswith(BOXED) else None
    return boxed.of_box() if boxed else None


def is_quick(name: str) -> bool:
    """Return whether the worker computes it itself, even with a verifier pool."""
    kind = kind_of(name)
    return is_remote(name) or (kind is not None and not kind.is_slow)


def needs_jail(names: Iterable[str]) -> bool:
    """Return whether one of these rewards runs code of an answer."""
    return any(kind.needs_jail for name in names if (kind := kind_of(name)))


def is_remote(name: str) -> bool:
    """Return whether a service computes it (score.py)."""
    return name.removeprefix(BOXED) == REMOTE


def check_packages(names: Iterable[str]) -> None:
    """Raise ConfigError if one of these rewards needs a package that is not installed. Imports nothing."""
    for name in names:
        if (kind := kind_of(name)) and kind.package:
            check_installed(kind.package, f"reward {name}")
