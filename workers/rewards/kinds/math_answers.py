"""``math`` and ``deepscaler``: the last box of an answer, equal to the label in notation, or as mathematics.

First both are brought into one spelling (math_notation.py); numbers and texts are decided by that. Formulas are then
compared as mathematics (math_answers.py). Both rewards run in processes that can be killed.
"""

import re
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from penstock.workers.rewards.kinds.boxed import END_OF_THOUGHTS, MARK, last_box
from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.kinds.math_notation import Notation, exact_value, fraction_parts, read_notation

#: Most unknowns of two formulas to compare.
MAX_SYMBOLS = 8
#: Digits of compared values, and the largest difference that may count as 0.
_DIGITS, _NEAR = 40, 1e-25
#: Digits to which math-verify compares what has no unknowns.
_VERIFY_DIGITS = 50
#: Powers whose evaluation may take for ever.
_BIG_POWER = re.compile(r"\^\{[+-]?\d{4,}|\^\{[^{}]*\^|!!|\d{5,}!")
#: Two numbers side by side, a number with two points, and signs that the grammar ignores: primes, a number's base.
_NO_FORMULA = re.compile(r"\d \d|\.\d*\.|'|\\prime|\d_")
#: Variables that the grammar takes for a constant or a function, or for the small letter.
_GREEK = re.compile(r"\\(gamma|Gamma(?!\()|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![a-zA-Z])")
_WORD = re.compile(r"(?<![a-zA-Z\\])(?<!\\[a-zA-Z])[a-zA-Z]{4,}")
_COMMANDS = re.compile(r"\\(?:(?:begin|end)\{[a-z]?matrix\}|[a-zA-Z]+)")
_ONLY_WORDS = re.compile(r"[^\d+*/^=<>\\|]*[a-zA-Z]{3}[^\d+*/^=<>\\|]*")


def is_equal(label: str, answer: str) -> bool:
    """Return whether two formulas are equal as mathematics, by sympy if it can decide, else by math-verify.

    Formulas are LaTeX in the spelling of math_notation.py, read completely by latex2sympy2_extended's grammar: no part
    of an answer is evaluated as Python. A formula that cannot be read completely is equal to no other. May take long or
    hang in C, so it runs in processes that can be killed (processes.py); raises nothing that is an answer's fault.
    """
    wanted, given = formula(label), formula(answer)
    if wanted is None or given is None or len(wanted.free_symbols | given.free_symbols) > MAX_SYMBOLS:
        return False
    try:
        decided = _decide(wanted, given)
        return _verified(wanted, given) if decided is None else decided
    # sympy may raise anything; only proven equality counts.
    except Exception:
        return False


@lru_cache(maxsize=512)
def formula(text: str) -> Any:
    """Return a formula as sympy has it, with its decimals as exact numbers; None if it cannot be read completely."""
    if not text or _BIG_POWER.search(text) or _NO_FORMULA.search(text) or _has_words(text):
        return None
    import sympy
    from latex2sympy2_extended import latex2sympy

    try:
        found = latex2sympy(_GREEK.sub(_variable, text), normalization_config=None)
        if isinstance(found, sympy.MatrixBase):
            found = found.as_immutable()
        decimals = found.atoms(sympy.Float)
        return found.xreplace({one: sympy.Rational(str(one)) for one in decimals}) if decimals else found
    # Its grammar and its visitors may raise anything.
    except Exception:
        return None


def _variable(found: re.Match[str]) -> str:
    """Return a name that the grammar reads as one variable."""
    return f" {'c' if found[1][0].isupper() else 'g'}_{{\\{found[1].lower()}}}"


def _has_words(text: str) -> bool:
    """Return whether it has words, which are compared as text: ``act`` is not ``cat``."""
    return bool(_ONLY_WORDS.fullmatch(text) or _WORD.search(_COMMANDS.sub(" ", text)))


def _decide(wanted: Any, given: Any) -> bool | None:
    """Return True if sympy proves the two equal, False if their values differ; None if it proves neither."""
    import sympy

    if not (isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr)):
        return None
    if isinstance(wanted, sympy.MatrixExpr) or isinstance(given, sympy.MatrixExpr):
        return None
    difference = (wanted - given).doit()
    if difference == 0 or sympy.expand(difference) == 0:
        return True
    if _differs(difference):
        return False
    if sympy.simplify(difference) == 0:
        return True
    complex_difference = _with_imaginary_unit(difference)
    return True if complex_difference is not None and sympy.simplify(complex_difference) == 0 else None


def _differs(difference: Any) -> bool:
    """Return whether a difference has a value other than 0, with ``i`` as an unknown and as the imaginary unit."""
    import sympy

    for reading in (difference, _with_imaginary_unit(difference)):
        if reading is not None:
            symbols = sorted(reading.free_symbols, key=str)
            values = {symbol: sympy.Rational(7 * at + 3, 5 * at + 11) for at, symbol in enumerate(symbols)}
            value = sympy.N(reading.subs(values), _DIGITS)
            if not (value.is_number and value.is_finite and abs(complex(value)) > _NEAR):
                return False
    return True


def _with_imaginary_unit(expression: Any) -> Any:
    """Return an expression with the imaginary unit for its unknown ``i``; None if it has none."""
    import sympy

    unit = next((symbol for symbol in expression.free_symbols if str(symbol) == "i"), None)
    return None if unit is None else expression.subs(unit, sympy.I)


def _verified(wanted: Any, given: Any) -> bool:
    """Return math-verify's verdict on two formulas that were read completely."""
    import sympy
    from math_verify import verify
    from math_verify.grader import is_relation

    if isinstance(wanted, sympy.Symbol) and isinstance(given, sympy.Symbol):
        return bool(wanted == given)
    if is_relation(given) and not is_relation(wanted):
        return False
    if is_relation(wanted) and wanted.free_symbols != given.free_symbols and not isinstance(given, sympy.Set):
        return False
    return bool(
        verify(wanted, given, float_rounding=_VERIFY_DIGITS, numeric_precision=_VERIFY_DIGITS, timeout_seconds=None)
    )


#: Longest answer or label that is compared, in characters: longer ones are no result.
MAX_ANSWER = 4096
#: How models without thoughts begin their answer.
RESPONSE = "###Response"
#: A relation may be written as an interval too.
_RELATION = re.compile(r"[<>]|\\[gl]eq(?![a-zA-Z])")
_OPEN, _CLOSE = "([", ")]"
#: Most values that are compared in any order.
_MAX_FREE = 8
#: A variable before the equals sign of an entry, and before the set that it is an element of.
_NAMED = re.compile(r"(?:^|(?<=,))([a-z]|\\[a-zA-Z]+)=(?=[^=,]*(?:,|$))")
_MEMBER = re.compile(r"([a-z]|\\[a-zA-Z]+)\\in(?![a-zA-Z])(.+)")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-z]")
_SIGNS = re.compile(r"\\pm(?![a-zA-Z]) ?")
_PLUS = re.compile(r"(?:^|(?<=[{(=]))\+")


@lru_cache(maxsize=256)
def _label(label: str) -> Notation | None:
    """Return the normalized label, with its formulas parsed at no answer's expense; None if empty or too long."""
    found = last_box(label) if MARK in label else label
    if not found or len(found) > MAX_ANSWER:
        return None
    notation = read_notation(found)
    for entry in {*_entries(notation.text)[1], *_values(notation)[1]}:
        if exact_value(entry) is None:
            is_equal(entry, "0")
    return notation


def read_label(label: str) -> None:
    """Parse the label, which is then cached for its answers."""
    _label(label)


def math(question: Question) -> int:
    r"""Return 1 if the last ``\boxed{}`` equals the label (its last box, if it has one); else 0, also without a box."""
    return _score(question.text, question.label)


def deepscaler(question: Question) -> int:
    r"""Return ``math`` of the text after the last ``</think>``, or else the first ``###Response``; without either 0.

    Luo et al. 2025, "DeepScaleR: Surpassing O1-Preview with a 1.5B Model by Scaling RL".
    """
    text = question.text
    if END_OF_THOUGHTS in text:
        return _score(text.rpartition(END_OF_THOUGHTS)[2], question.label)
    if RESPONSE in text:
        return _score(text.split(RESPONSE, 2)[1], question.label)
    return 0


def _score(text: str, label: str) -> int:
    answer = last_box(text)
    if not answer or len(answer) > MAX_ANSWER or (wanted := _label(label)) is None:
        return 0
    return int(is_same(wanted, read_notation(answer)))


def is_same(label: Notation, answer: Notation) -> bool:
    """Return whether an answer equals a label, entry by entry where they are lists, tuples or intervals.

    Units, names before an equals sign and words between entries count where both have some.
    """
    if _conflict(label.unit, answer.unit) or _conflict(label.name, answer.name):
        return False
    if _conflict(label.joints, answer.joints) and any(map(_LETTER.search, _values(label)[1])):
        return False
    if label.text == answer.text:
        return True
    if not label.text or not answer.text:
        return False
    if _RELATION.search(label.text):
        return is_equal(label.text, answer.text)
    if _RELATION.search(answer.text) and _MEMBER.fullmatch(label.text):
        return is_equal(answer.text, label.text)
    # An equation that is not solved may be the question, unless it is asked for a curve.
    if (label.name == "y" and _is_curve(label, answer)) or _is_curve(answer, label):
        return is_equal(_equation(label), _equation(answer))
    label, answer = _without_variable(label), _without_variable(answer)
    (name, wanted, is_free), (other, given, is_other_free) = _values(label), _values(answer)
    if _conflict(name, other):
        return False
    if is_free or is_other_free:
        return _are_same_in_any_order(wanted, given)
    (brackets, wanted), (others, given) = _entries(label.text), _entries(answer.text)
    if _is_set(label.text) != _is_set(answer.text) and brackets == others == "" and len(wanted) != len(given):
        return is_equal(_as_set(label.text), _as_set(answer.text))
    return brackets == others and len(wanted) == len(given) and all(map(_is_same_entry, wanted, given))


def _conflict(one: Hashable, other: Hashable) -> bool:
    return bool(one and other and one != other)


def _is_curve(solved: Notation, equation: Notation) -> bool:
    """Return whether ``y=3x-4`` is to be compared with an equation that is not solved, as ``3x-y=4``."""
    is_equation = "=" in equation.text and "," not in equation.text
    return bool(is_equation and solved.name and _LETTER.search(solved.text))


def _equation(notation: Notation) -> str:
    return f"{notation.name}={notation.text}" if notation.name else notation.text


def _without_variable(notation: Notation) -> Notation:
    """Return the set of ``x\\in[1,2]``, with the variable as its name."""
    found = _MEMBER.fullmatch(notation.text)
    return replace(notation, name=found[1], text=found[2].strip()) if found and not notation.name else notation


def _values(notation: Notation) -> tuple[str, list[str], bool]:
    """Return a variable, its values, and whether their order is free: of ``\\pm 3`` and of ``x=1,x=2``."""
    brackets, entries = _entries(notation.text[2:-2] if _is_set(notation.text) else notation.text)
    if brackets:
        return notation.name, [notation.text], False
    values = [value for entry in entries for value in _both_signs(entry)]
    names = [found[1] if (found := _NAMED.match(value)) else "" for value in values]
    if names[0] and len(set(names)) == 1:
        return names[0], [value.partition("=")[2] for value in values], len(values) > 1
    return notation.name, values, len(values) > len(entries)


def _both_signs(entry: str) -> list[str]:
    """Return the two values of a formula with one plus-minus sign; any other formula as it is."""
    if len(_SIGNS.findall(entry)) != 1 or "\\mp" in entry:
        return [entry]
    return [_PLUS.sub("", _SIGNS.sub(sign, entry)) for sign in "+-"]


def _are_same_in_any_order(wanted: list[str], given: list[str]) -> bool:
    left = list(given) if len(wanted) == len(given) <= _MAX_FREE else [""]
    for value in wanted:
        found = next((one for one in left if _is_same_entry(value, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _is_set(text: str) -> bool:
    return text.startswith("\\{") and text.endswith("\\}")


def _as_set(text: str) -> str:
    """Return a list of solutions as a set."""
    return text if _is_set(text) or text[0] in _OPEN else f"\\{{{text}\\}}"


def _entries(text: str) -> tuple[str, list[str]]:
    """Return the brackets of a tuple or interval and the text between its commas; '' and the parts of a list; '' and
    the whole of anything else."""
    if len(text) > 2 and text[0] in _OPEN and text[-1] in _CLOSE:
        found = _between_commas(text[1:-1])
        if found is not None and len(found) > 1:
            return text[0] + text[-1], found
    found = _between_commas(text) or [text]
    names = {name[1] for entry in found if (name := _NAMED.match(entry))}
    return "", sorted(found) if len(names) == len(found) else found


def _between_commas(text: str) -> list[str] | None:
    """Split at the commas outside brackets; return None if a bracket is closed but never opened."""
    found, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and not depth:
            found.append(text[begin:index])
            begin = index + 1
    return [*found, text[begin:]]


def _is_same_entry(label: str, answer: str) -> bool:
    if label == answer:
        return True
    wanted, given, parts = exact_value(label), exact_value(answer), fraction_parts(answer)
    # For an integer it must be written out, for a fraction it must be reduced.
    if wanted is not None and (wanted.denominator == 1 or (parts and fraction_parts(label))):
        return wanted == given and (parts is None or (wanted.denominator > 1 and gcd(*parts) == 1))
    if wanted is not None and given is not None:
        return wanted == given
    return is_equal(label, answer)
