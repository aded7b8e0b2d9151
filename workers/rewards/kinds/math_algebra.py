"""Whether two formulas are equal as mathematics: sympy for what it can decide, math-verify for the rest.

Formulas are LaTeX in the spelling of math_notation.py, read completely by latex2sympy2_extended's grammar: nothing of
an answer is evaluated as Python. A formula that cannot be read completely equals nothing. Both may take long, or hang
in C; they run in processes that can be killed (processes.py).
"""

import re
from functools import lru_cache
from typing import Any

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
    """Return whether two formulas are equal. May take long, or hang; raises nothing that is an answer's fault."""
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
