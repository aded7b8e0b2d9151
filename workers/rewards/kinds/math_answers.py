"""``math`` and ``deepscaler``: the last box of an answer, equal to the label in notation, or as mathematics.

Equal as mathematics: the difference of the two is simplified to 0 by sympy. What is read is LaTeX, by
latex2sympy2_extended's grammar: nothing of an answer is evaluated as Python. Both run in processes that can be killed.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workers.rewards.kinds.box import END_OF_THOUGHTS, MARK, last_box
from workers.rewards.kinds.math_text import is_integer, notation, plain
from workers.rewards.kinds.question import Question

#: Longest answer or label that is compared, in characters: longer ones are no result.
MAX_ANSWER = 4096
#: What other models than those with thoughts begin their answer with.
RESPONSE = "###Response"
#: Most unknowns of a difference that is simplified, and powers whose simplification may take for ever.
MAX_LETTERS = 2
_BIG_POWER = re.compile(r"\^\{?-?\d\d|\^\{?\d+\}?\^|\^\(")
_FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
_COMMAND = re.compile(r"\\?(?:sqrt|frac)")
_FUNCTION = re.compile(r"\\?\b(sqrt|pi|sin|cos|tan|log|ln|exp)(?![a-z])")
_ROOT = re.compile(r"\\sqrt\(([^()]*)\)")
_POWER = re.compile(r"\^(-?\w)")
_OPEN, _CLOSE = "([", ")]"


@dataclass(frozen=True, slots=True)
class Gold:
    """A label in its normal forms."""

    notation: str
    plain: str


@lru_cache(maxsize=256)
def _gold(label: str) -> Gold | None:
    """None where there is nothing to be equal to. Compared once, because only that evaluates it."""
    found = last_box(label) if MARK in label else label
    if not found or len(found) > MAX_ANSWER:
        return None
    gold = Gold(notation(found), plain(found))
    for entry in _entries(gold.plain):
        if not is_integer(entry) and _may_be_read(entry):
            _is_zero(entry, "0")
    return gold


def read_label(label: str) -> None:
    """Read the label, whose answers are then compared with what was read."""
    _gold(label)


def math(question: Question) -> int:
    r"""1 where the last ``\boxed{}`` equals the label (its last box, where it has one); else 0, without a box too."""
    return _judged(question.text, question.label)


def deepscaler(question: Question) -> int:
    r"""As ``math``, for what follows the last ``</think>``, or else the first ``###Response``; without either 0.

    Luo et al. 2025, "DeepScaleR: Surpassing O1-Preview with a 1.5B Model by Scaling RL".
    """
    text = question.text
    if END_OF_THOUGHTS in text:
        return _judged(text.rpartition(END_OF_THOUGHTS)[2], question.label)
    if RESPONSE in text:
        return _judged(text.split(RESPONSE, 2)[1], question.label)
    return 0


def _judged(text: str, label: str) -> int:
    answer = last_box(text)
    if answer is None or len(answer) > MAX_ANSWER or (gold := _gold(label)) is None:
        return 0
    return int(notation(answer) == gold.notation or is_same(gold.plain, plain(answer)))


def is_same(label: str, answer: str) -> bool:
    """Whether two answers in their ``plain`` form are the same, entry by entry where they are tuples or intervals."""
    if label == answer:
        return True
    if not answer or not label:
        return False
    wanted, said = _entries(label), _entries(answer)
    if len(wanted) > 1 and (label[0], label[-1]) != (answer[0], answer[-1]):
        return False
    return len(wanted) == len(said) and all(map(_is_same_entry, wanted, said))


def _entries(text: str) -> list[str]:
    """What stands between the commas of a tuple or interval; else all of it."""
    if len(text) < 3 or text[0] not in _OPEN or text[-1] not in _CLOSE:
        return [text]
    found, depth, begin = [], 0, 1
    for index, character in enumerate(text[1:-1], 1):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return [text]
        if character == "," and not depth:
            found.append(text[begin:index])
            begin = index + 1
    return [*found, text[begin:-1]]


def _is_same_entry(label: str, answer: str) -> bool:
    if label == answer:
        return True
    # A fraction must be reduced, and an integer written out.
    if _FRACTION.fullmatch(label) and _FRACTION.fullmatch(answer):
        return False
    return is_integer(label) == is_integer(answer) and _may_be_read(f"{label}-{answer}") and _is_zero(label, answer)


def _may_be_read(text: str) -> bool:
    letters = {character for character in _COMMAND.sub("", text) if character.isalpha()}
    return len(letters) <= MAX_LETTERS and not _BIG_POWER.search(text)


def _is_zero(label: str, answer: str) -> bool:
    import sympy

    wanted, said = _expression(label), _expression(answer)
    if wanted is None or said is None:
        return False
    try:
        return bool(sympy.simplify(wanted - said) == 0)
    # What sympy makes of an answer is not known beforehand; only what it proves is equal.
    except Exception:
        return False


def _expression(text: str) -> Any:
    """``plain`` text as a sympy expression; None where it is none."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    text = _ROOT.sub(r"\\sqrt{\1}", _FUNCTION.sub(r"\\\1 ", text).replace("\\sqrt (", "\\sqrt("))
    try:
        found = latex2sympy(_POWER.sub(r"^{\1}", text), normalization_config=None)
    # Its grammar and its visitors raise what they like.
    except Exception:
        return None
    return found if isinstance(found, sympy.Expr) else None
