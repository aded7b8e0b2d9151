"""Normal forms of answers to questions of mathematics, as text; no algebra.

``notation`` is that of MATH's own evaluation (Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the
MATH Dataset", section 3): two answers that differ in layout alone are the same. ``plain`` leaves more out, as the
grader of PRM800K does (Lightman et al. 2023, "Let's Verify Step by Step", appendix): units, money, case, words of
magnitude.
"""

import re
from functools import cache
from typing import Any

_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_SHORT_EQUATION = re.compile(r"[^=]{1,2}=([^=]*)")
_MIXED_QUOTIENT = re.compile(r"(?<=\d) +(?=\d{1,40} */)")
_SIMPLE_QUOTIENT = re.compile(r"(-?\d{1,40})/(-?\d{1,40})")

_UNITS = re.compile(
    r"(?:degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?"
    r" *(?:\^[0-9]+)?"
)
_MAGNITUDES = (("trillion", "*10^{12}"), ("billion", "*10^9"), ("million", "*10^6"))
#: What stands between numbers and says nothing.
_SIGNS = ("$", "%", "\\!", "\\,", "\\;", "\\:", "\\left", "\\right", "\\quad")
_COMMANDS = (
    ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\cdot", "*"), ("\\times", "*"), ("·", "*"), ("×", "*"),
    ("**", "^"), ("\\pi", "pi "), ("π", "pi "), ("\\infty", "inf "), ("∞", "inf "), ("\\cup", "u"), ("∪", "u"),
    ("√", "\\sqrt"), ("\\ ", " "),
)  # fmt: skip
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SMALL_FRACTION = re.compile(r"\\frac\{(-?[\w.]+)\}\{([\w.]+)\}")
_MIXED = re.compile(r"(?<=\d) +(?=\d)")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:e[+-]?\d{1,2})?", re.IGNORECASE)
_SMALL_POWER = re.compile(r"\^\{(-?\w)\}")


def notation(answer: str) -> str:
    """One spelling for answers that differ in layout alone: ``\\dfrac12`` is ``\\frac{1}{2}``, ``x = 5`` is ``5``."""
    from latex2sympy2_extended import normalize_latex

    answer = _unwrapped(answer.strip()).replace("\n", "").replace("\\%", "")
    answer = _DEGREES.sub("", answer)
    answer = _MIXED_QUOTIENT.sub("+", normalize_latex(answer, _layout())).replace(" ", "")
    if equation := _SHORT_EQUATION.fullmatch(answer):
        answer = equation[1]
    if quotient := _SIMPLE_QUOTIENT.fullmatch(answer):
        answer = f"\\frac{{{quotient[1]}}}{{{quotient[2]}}}"
    return "\\frac{1}{2}" if answer == "0.5" else answer


@cache
def _layout() -> Any:
    from latex2sympy2_extended import NormalizationConfig

    return NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )


def plain(answer: str) -> str:
    """An answer as a formula alone: lower case, no blanks, units, money or words around it, numbers in one spelling."""
    answer = _unwrapped(answer.strip())
    for spelling in ("\\%", "\\$"):
        answer = answer.replace(spelling, "")
    answer = answer.replace(" or ", " , ").replace(" and ", " , ").replace("{,}", ",").replace(",\\!", "")
    for word, power in _MAGNITUDES:
        answer = answer.replace(word, power)
    answer = _DEGREES.sub("", _UNITS.sub("", answer))
    return _one_number(_formula(answer))


def _formula(answer: str) -> str:
    for sign in _SIGNS:
        answer = answer.replace(sign, "")
    for command, short in _COMMANDS:
        answer = answer.replace(command, short)
    answer = _WORDS.sub(r"\1", answer).strip()
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = _SMALL_FRACTION.sub(r" \1/\2", answer).strip().replace("- ", "-")
    return _SMALL_POWER.sub(r"^\1", _MIXED.sub("+", answer).replace(" ", "").lower())


def _one_number(answer: str) -> str:
    """``5.0``, ``5`` and ``5.`` are ``5``; ``1,000`` is ``1000``."""
    number = _GROUPED.sub("", answer)
    if not _NUMBER.fullmatch(number) or not is_integer(number):
        return answer
    return str(round(float(number))) if "." in number or "e" in number else str(int(number))


def is_integer(text: str) -> bool:
    """Whether it is a number within 1e-7 of an integer, commas between thousands left out."""
    text = _GROUPED.sub("", text)
    if not _NUMBER.fullmatch(text):
        return False
    number = float(text)
    return abs(number) < 1e300 and abs(number - round(number)) <= 1e-7


def _unwrapped(answer: str) -> str:
    whole = _WHOLE_TEXT.fullmatch(answer)
    return whole[1].strip() if whole else answer
