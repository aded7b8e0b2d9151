"""``dapo``: an integer after the last ``Answer:``, as in DAPO's rewards.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (section 2.4; its data: section 3.5).
The answer's normal form is that of Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language
Models" (Minerva, appendix D.1).
"""

import re
from typing import Any

from penstock.workers.rewards.kinds.kind import Question, check_label

#: Longest label in characters: normalization takes quadratic time.
MAX_LABEL = 1024
#: Characters at the end of an answer that must contain the result.
TAIL = 300
#: Prediction if no line starts with ``Answer:``.
NONE = "[INVALID]"

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
#: Words without meaning for a number: articles, units, layout. Longer ones first if one begins another.
_NOISE = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
#: Replaced before them, in this order.
_SPELLINGS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_BETWEEN_DOLLARS = re.compile(r"[^$]*\$([^$]*)\$.*", re.DOTALL)
#: Nested, in this order.
_WRAPS = tuple(re.compile(rf"\\{name}\{{([^}}]*)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)


def dapo(question: Question) -> dict[str, Any]:
    """Return ``score``: 1 if the last ``Answer:`` within the last ``TAIL`` characters is the label, else -1; ``acc``:
    the same as a bool; ``pred``: the answer that was read.

    Raises:
        ValueError: the label is no integer, or too long for one.
    """
    check_label("dapo", [question.label], MAX_LABEL)
    found = _ANSWER.findall(question.text[-TAIL:])
    pred = normal(found[-1]) if found else NONE
    right = pred == _integer(question.label)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def normal(answer: str) -> str:
    """Return the normal form of an answer, without units, words and layout."""
    answer = answer.rpartition("=")[2]
    for before, after in _SPELLINGS:
        answer = answer.replace(before, after)
    for noise in _NOISE:
        answer = answer.replace(noise, "")
    if between := _BETWEEN_DOLLARS.fullmatch(answer):
        answer = between[1]
    for wrap in (*_WRAPS, _BOX):
        answer = wrap.sub(r"\1", answer)
    answer = answer.replace("$", "").strip()
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


def _integer(label: str) -> str:
    text = normal(label)
    try:
        # Through a float only if needed: floats are exact up to 2^53.
        return str(int(text) if text.lstrip("+-").isdecimal() else int(float(text)))
    except (ValueError, OverflowError):
        raise ValueError(f"reward dapo: the label {label[:80]!r} is not an integer; use math") from None
