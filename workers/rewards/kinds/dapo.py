"""``dapo``: an integer behind the last ``Answer:``, as DAPO's rewards have it.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (section 2.4; its data: section 3.5).
The answer's normal form is that of Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language
Models" (Minerva, appendix D.1).
"""

import re
from typing import Any

from penstock.workers.rewards.kinds.question import Question, check_label

#: Most characters of a label: its normal form takes time by the square of its length.
MAX_LABEL = 1024
#: Characters at the end of an answer in which the result must stand.
TAIL = 300
#: What is given where no line begins so.
NONE = "[INVALID]"

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
#: Words that say nothing of a number: articles, units, marks of layout. Longer ones first where one begins another.
_NOISE = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
#: Before them, in this order.
_SPELLINGS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_BETWEEN_DOLLARS = re.compile(r"[^$]*\$([^$]*)\$.*", re.DOTALL)
#: One inside the other, in this order.
_WRAPS = tuple(re.compile(rf"\\{name}\{{([^}}]*)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)


def dapo(question: Question) -> dict[str, Any]:
    """``score``: 1 where the last ``Answer:`` within the last ``TAIL`` characters is the label, else -1; ``acc``: the
    same as a bool; ``pred``: what was read.

    Raises:
        ValueError: the label is no integer, or too long for one.
    """
    check_label("dapo", [question.label], MAX_LABEL)
    found = _ANSWER.findall(question.text[-TAIL:])
    pred = normal(found[-1]) if found else NONE
    right = pred == _integer(question.label)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def normal(answer: str) -> str:
    """What an answer says, without units, words and layout around it."""
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
        # By way of a float only where it must be: those are exact up to 2^53.
        return str(int(text) if text.lstrip("+-").isdecimal() else int(float(text)))
    except (ValueError, OverflowError):
        raise ValueError(f"reward dapo: the label {label[:80]!r} is not an integer; use math") from None
