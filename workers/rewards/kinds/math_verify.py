"""``math_verify``: an answer equal to its label as mathematics, by math-verify."""

from functools import lru_cache
from typing import Any

from penstock.workers.rewards.kinds.boxed import MARK, after_thoughts, closing_brace
from penstock.workers.rewards.kinds.kind import Question

#: Characters at the end of an answer that are read: results are at the end.
MAX_TEXT = 16 * 1024


def judge(question: Question) -> float:
    """Return 1 if the result in the answer equals the label as mathematics; else 0."""
    from math_verify import parse, verify

    said = parse(_without_dollars(final(question.text)), parsing_timeout=None)
    return float(verify(_parsed(question.label), said, timeout_seconds=None))


def read_label(label: str) -> None:
    """Read the label. Raises ValueError if it is not mathematics."""
    if not _parsed(label):
        raise ValueError(f"the label {label[:80]!r} cannot be read as mathematics")


def final(text: str) -> str:
    """Return the judged part of an answer: the text after its last ``</think>``, of that the last box if it has one."""
    text = after_thoughts(text)[-MAX_TEXT:]
    opening = MARK + "{"
    begin = text.rfind(opening)
    if begin < 0:
        return text
    end = closing_brace(text, begin + len(opening))
    return text[begin : None if end is None else end + 1]


@lru_cache(maxsize=256)
def _parsed(label: str) -> list[Any]:
    """Return the parsed label; [] if it is not mathematics. Compared once, because only that evaluates it."""
    from math_verify import parse, verify

    label = _without_dollars(label)
    marked = any(mark in label for mark in ("$", "\\boxed", "\\(", "\\["))
    gold: list[Any] = parse(label if marked else f"\\boxed{{{label}}}", parsing_timeout=None)
    if gold:
        verify(gold, parse("\\boxed{1}", parsing_timeout=None), timeout_seconds=None)
    return gold


def _without_dollars(text: str) -> str:
    """Remove ``\\$``: as a sign of money it has no value, and does not mark mathematics."""
    return text.replace("\\$", "")
