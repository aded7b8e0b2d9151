"""Normalize answers to mathematical questions as text; no algebra.

Answers that differ in layout alone are the same text after it, as in MATH's own evaluation (Hendrycks et al. 2021,
"Measuring Mathematical Problem Solving With the MATH Dataset", section 3) and the grader of PRM800K (Lightman et al.
2023, "Let's Verify Step by Step", appendix): braces around arguments, names of commands, blanks, units, money, words of
magnitude, and the name before an equals sign. The text stays LaTeX, which math_answers.py reads.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from penstock.workers.rewards.kinds.boxed import closing_brace

_NAMES = {
    "dollar": "dollar dollars usd", "cent": "cent cents",
    "in": "in inch inches inchs", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "mm": "mm millimeter millimeters millimetre millimetres", "cm": "cm centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters", "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre "
    "kilometres", "s": "s sec secs second seconds", "min": "min mins minute minutes", "h": "h hr hrs hour hours",
    "day": "day days", "week": "week weeks", "month": "month months", "year": "yr yrs year years",
    "mg": "mg milligram milligrams", "g": "g gram grams", "kg": "kg kilogram kilograms", "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces", "ml": "ml milliliter milliliters", "l": "l liter liters litre litres",
    "gal": "gal gallon gallons", "mi/h": "mph", "km/h": "kph kmh", "degree": "degree degrees deg",
    "radian": "radian radians rad", "percent": "percent pct",
    "am": "am a.m", "pm": "pm p.m",
}  # fmt: skip
#: Spelling -> unit.
UNITS = {spelling: unit for unit, spellings in _NAMES.items() for spelling in spellings.split()}

_POWER = r"(?:\^\s*\{?\s*(\d)\s*\}?)?"
_IN_TEXT = re.compile(rf"\\(?:text\w*|math\w\w|mbox|operatorname)\s*\{{([^{{}}]*)\}}\s*{_POWER}\s*\.?\s*$")
#: Without a \\text only spellings of several letters count: ``5m`` is a product, and so is ``5am``.
_PRODUCTS = ("am", "pm")
_SPELLINGS = sorted((word for word in UNITS if len(word) > 1 and word not in _PRODUCTS), key=len, reverse=True)
_WORD = "|".join(map(re.escape, _SPELLINGS))
_BARE = re.compile(
    rf"(?<=[\d}}).\s])\s*\b((?:(?:square|sq|cubic)\s+)?(?:{_WORD})(?:\s*(?:/|\bper\b)\s*(?:{_WORD}|[smh]))?)\s*"
    rf"{_POWER}\s*\.?\s*$",
    re.IGNORECASE,
)
#: The space keeps ``3in`` apart from a product of one-letter variables only where a digit ends the number.
_BARE_AFTER_DIGIT = re.compile(rf"(?<=\d)({_WORD})\s*{_POWER}\s*\.?\s*$", re.IGNORECASE)
_DEGREE = re.compile(r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree)\s*$")
_PERCENT = re.compile(r"\\?%\s*$")
_MONEY = re.compile(r"^([+-]?\s*)\\?\$\s*(?=[\d.])")
#: An operator in front makes a unit part of a formula.
_NO_NUMBER = re.compile(r"(?:^|[-+*/=<>,(^_\[{]|\\(?:cdot|times|frac|sqrt|text|cup|geq?|leq?|neq?))\s*$")
_JOINS = re.compile(r"\b(?:or|and|if|not)\b|[,=<>]")
#: Letters that stand for numbers when they are set upright.
_CONSTANTS = ("i", "e", "d")
_MAX_UNITS = 4


def split_unit(answer: str) -> tuple[str, str]:
    """Return an answer without its unit (``30 cm^2``, ``45^\\circ``), and the unit; '' if none or unknown.

    Two known units that differ make an answer wrong; an unknown unit is ignored.
    """
    found = ""
    if money := _MONEY.match(answer):
        answer, found = money[1] + answer[money.end() :], "dollar"
    for _ in range(_MAX_UNITS):
        rest, unit = _last_unit(answer)
        if rest == answer:
            break
        answer, found = rest, found or unit
    return answer, found


def _last_unit(answer: str) -> tuple[str, str]:
    for pattern, unit in ((_DEGREE, "degree"), (_PERCENT, "percent")):
        if (match := pattern.search(answer)) and not _NO_NUMBER.search(answer[: match.start()]):
            return answer[: match.start()].rstrip(), unit
    if match := _IN_TEXT.search(answer):
        return _text_unit(answer, match)
    if match := _BARE.search(answer) or _BARE_AFTER_DIGIT.search(answer):
        rest = answer[: match.start()].rstrip()
        if not _NO_NUMBER.search(rest):
            return rest, _unit(match[1], match[2] or "")
    return answer, ""


def _text_unit(answer: str, match: re.Match[str]) -> tuple[str, str]:
    words, rest = match[1].strip(), answer[: match.start()].rstrip()
    if _NO_NUMBER.search(rest) or words in _CONSTANTS:
        return answer, ""
    unit = _unit(words, match[2] or "")
    # Words that are no known unit may be part of the answer: "A or B".
    if unit or not words or (re.search(r"\d", rest) and not _JOINS.search(words)):
        return rest, unit
    return answer, ""


def _unit(words: str, power: str) -> str:
    """Return one name for a unit and its power; '' if it is unknown."""
    parts = re.split(r"\s*/\s*|\s+per\s+", words.strip().lower())
    names = [_one_unit(part) for part in parts]
    if len(names) > 2 or not all(names):
        return ""
    return "/".join(names) + (f"^{power}" if power not in ("", "1") else "")


def _one_unit(words: str) -> str:
    power, rest = "", words.split()
    if len(rest) == 2 and rest[0] in ("square", "sq", "cubic"):
        power, rest = ("^3" if rest[0] == "cubic" else "^2"), rest[1:]
    elif len(rest) == 2 and rest[1] in ("squared", "cubed"):
        power, rest = ("^3" if rest[1] == "cubed" else "^2"), rest[:1]
    unit = UNITS.get(rest[0].rstrip(".")) if len(rest) == 1 else None
    return unit + power if unit else ""


#: Deepest nesting of arguments that is rewritten.
MAX_DEPTH = 40
#: Largest power of ten in a number.
_MAX_EXPONENT = 400

_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mathit|mbox|operatorname)\s*"
_ALL_TEXT = re.compile(rf"{_TEXT_COMMAND}\{{([^{{}}]*)\}}")
_MATH_MARKS = re.compile(r"\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_UNICODE = {
    "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ",
    "·": "*", "×": "*", "−": "-", "–": "-", "÷": "/", "½": "\\frac{1}{2}", "²": "^{2}", "³": "^{3}", "°": "^\\circ ",
    "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
}  # fmt: skip
_UNICODE_ROOT = re.compile(r"√\s*(\d+)")
#: Command -> its one spelling; a command ends where no letter follows.
_COMMANDS = {
    "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "ge": "\\geq", "geqslant": "\\geq", "le": "\\leq",
    "leqslant": "\\leq", "ne": "\\neq", "cdot": "*", "times": "*", "div": "/", "lt": "<", "gt": ">", "left": "",
    "right": "", "quad": " ", "qquad": " ", "displaystyle": "", "lbrace": "\\{", "rbrace": "\\}", "degree": "^\\circ ",
    "lvert": "|", "rvert": "|", "vert": "|", "varnothing": "\\emptyset",
}  # fmt: skip
_COMMAND = re.compile(rf"\\({'|'.join(sorted(_COMMANDS, key=len, reverse=True))})(?![a-zA-Z])")
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\s+")
_BARE_NAME = re.compile(
    r"(?<![a-zA-Z\\])(sqrt|pi|sin|cos|tan|sec|csc|cot|log|ln|exp|infinity|infty|inf|theta|alpha|beta)(?![a-zA-Z])"
)
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
#: Bare, or at the beginning of a command for text, whose rest it keeps.
_MAGNITUDE = re.compile(
    rf"(?<=[\d}}]) ?({_TEXT_COMMAND}\{{ ?)?((?:(?:{'|'.join(_MAGNITUDES)})s?\b ?)+)(?!\d)", re.IGNORECASE
)
_NAME = re.compile(r"((?:\\?[a-zA-Z]+?|[A-Z])(?:_(?:\{\w+\}|\w))?(?:\([a-z]\))?|\([a-z](?:, ?[a-z])+\)) ?= ?([^=<>]+)")
_ONE_LETTER = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_.*|\(.*)?|\(.*\)")
_LIST_WORD = re.compile(r",? ?(?:\\text\{ ?(or|and) ?\}|(?<![a-zA-Z])(or|and)(?![a-zA-Z])) ?")

_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?|[+-]?\d{1,3}(?: \d{3})+")
_E_NOTATION = re.compile(r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_QUOTIENT = re.compile(r"(?<![\w.}/)])(\d+) ?/ ?(\d+)(?![\d.^/!])")
_REPEATING = re.compile(
    r"(?<![\d.])(?<!\d )(\d{0,400})\.(\d{0,400})\\(?:overline|bar) ?(?:\{ ?(\d{1,400}) ?\}|(\d))(?![\d.])"
)
_MIXED = re.compile(r"(?<![\w.}^_)])(-? ?)(\d+) ?(\\frac\{\d+\}\{\d+\})")
_DECIMAL = re.compile(
    r"([+-]?)(?:(\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:\*10\^\{([+-]?\d{1,3})\})?|10\^\{([+-]?\d{1,3})\})"
)
_FRACTION = re.compile(r"(-?)\\frac\{(-?)(\d{1,400})\}\{(-?)(\d{1,400})\}")
_MIXED_VALUE = re.compile(r"(-?)\((\d{1,400})\+\\frac\{(\d{1,400})\}\{(\d{1,400})\}\)")
_NOT_COMMAND = re.compile(r"(\\[a-zA-Z]+)|[A-Z]")


@dataclass(frozen=True, slots=True)
class Notation:
    """An answer in one spelling."""

    #: LaTeX without the parts below; text is compared by it, whatever its case.
    text: str
    #: '' if it has none, or an unknown one.
    unit: str = ""
    #: The left side of its equals sign: ``x`` of ``x = 5``.
    name: str = ""
    #: Words that join its entries: ``and``, ``or``.
    joints: frozenset[str] = frozenset()


def read_notation(answer: str) -> Notation:
    """Return an answer in one spelling. Takes time by the length of the answer alone; raises nothing."""
    text = _unwrapped(answer.strip())
    text = _SPACES.sub(" ", text.replace("{,}", ",").replace(",\\!", ",")).strip()
    name, text = _split_name(text)
    text = _MAGNITUDE.sub(_power_of_ten, text)
    text, unit = split_unit(text.rstrip("."))
    joints = frozenset(found[1] or found[2] for found in _LIST_WORD.finditer(text))
    text = _LIST_WORD.sub(",", text)
    text = _ALL_TEXT.sub(r"\1", text).replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _numbers(braced(_commands(text)))
    text = _NOT_COMMAND.sub(lambda found: found[1] or found[0].lower(), _tight(text))
    return Notation(text, unit, _tight(_commands(name)), joints)


def exact_value(text: str) -> Fraction | None:
    """Return the value of a number in one spelling; None if it is a formula."""
    if found := _DECIMAL.fullmatch(text):
        exponent = int(found[3] or found[4] or 0)
        value = Fraction(found[2] or 1) * Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None
        return None if value is None else -value if found[1] == "-" else value
    if found := _MIXED_VALUE.fullmatch(text):
        if not int(found[4]):
            return None
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return -value if found[1] else value
    parts = fraction_parts(text)
    return Fraction(*parts) if parts and parts[1] else None


def fraction_parts(text: str) -> tuple[int, int] | None:
    """Return numerator and denominator of a fraction of two integers, as they are written; None if it is no such."""
    found = _FRACTION.fullmatch(text)
    if found is None:
        return None
    sign = -1 if [found[1], found[2], found[4]].count("-") % 2 else 1
    return sign * int(found[3]), int(found[5])


def braced(text: str, depth: int = 0) -> str:
    """Put braces around each argument of ``\\frac``, ``\\sqrt``, ``^`` and ``_``."""
    if depth > MAX_DEPTH:
        return text
    parts, at = [], 0
    while at < len(text):
        part, at = _token(text, at, depth)
        parts.append(part)
    return "".join(parts)


def _token(text: str, at: int, depth: int) -> tuple[str, int]:
    """Return the token at ``at`` with its arguments, and the start of the next one."""
    for command, count in (("\\frac", 2), ("\\sqrt", 1)):
        end = at + len(command)
        if text.startswith(command, at) and not text[end : end + 1].isalpha():
            return _command(text, command, end, count, depth)
    if text[at] in "^_":
        argument, end = _argument(text, at + 1, depth, whole_number=True)
        return (text[at], at + 1) if argument is None else (f"{text[at]}{{{argument}}}", end)
    if text[at] == "\\":
        end = at + 2
        while text[at + 1 : at + 2].isalpha() and end < len(text) and text[end].isalpha():
            end += 1
        return text[at:end], end
    return text[at], at + 1


def _command(text: str, command: str, at: int, count: int, depth: int) -> tuple[str, int]:
    parts, end = [command], at
    if command == "\\sqrt" and text.startswith("[", at) and (close := text.find("]", at)) > 0:
        parts.append(text[at : close + 1])
        end = close + 1
    for _ in range(count):
        argument, end = _argument(text, end, depth, whole_number=False)
        if argument is None:
            return command, at
        parts.append(f"{{{argument}}}")
    return "".join(parts), end


def _argument(text: str, at: int, depth: int, *, whole_number: bool) -> tuple[str | None, int]:
    """Return the argument at ``at`` without braces, and its end; None if there is none."""
    while text.startswith(" ", at):
        at += 1
    if at >= len(text) or text[at] in ")]}" or depth >= MAX_DEPTH:
        return None, at
    if text[at] == "{":
        end = closing_brace(text, at + 1)
        return (None, at) if end is None else (braced(text[at + 1 : end], depth + 1).strip(), end + 1)
    if text[at] == "(" and (end := _closing_parenthesis(text, at)):
        return braced(text[at + 1 : end], depth + 1), end + 1
    if whole_number and (number := re.compile(r"[+-]? ?\d+").match(text, at)):
        return number[0].replace(" ", ""), number.end()
    if text[at] == "-" and whole_number and at + 1 < len(text):
        inner, end = _argument(text, at + 1, depth + 1, whole_number=True)
        return (None, at) if inner is None else ("-" + inner, end)
    if text[at] in "^_":
        return None, at
    return _token(text, at, depth + 1)


def _closing_parenthesis(text: str, at: int) -> int | None:
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    return None


def _unwrapped(answer: str) -> str:
    if marked := _MATH_MARKS.fullmatch(answer):
        inside = next(group for group in marked.groups() if group is not None)
        answer = answer if "$" in inside.replace("\\$", "") else inside.strip()
    found = _ALL_TEXT.fullmatch(answer)
    return found[1].strip() if found else answer


def _split_name(text: str) -> tuple[str, str]:
    found = _NAME.fullmatch(text)
    if found is None or not _ONE_LETTER.fullmatch(found[1]):
        return "", text
    return found[1], found[2].strip()


def _commands(text: str) -> str:
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text).replace("√", "\\sqrt ").replace("**", "^")
    text = _COMMAND.sub(lambda found: _COMMANDS[found[1]], text)
    text = re.sub(r"\^ ?(?:\\circ|\{ ?\\circ ?\})(?![a-zA-Z])", "", text)
    text = _BARE_NAME.sub(r"\\\1 ", text)
    return re.sub(r"\\(?:inf|infinity)(?![a-zA-Z])", r"\\infty", text)


def _numbers(text: str) -> str:
    text = text.strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _E_NOTATION.sub(lambda found: f"{found[1]}*10^{{{int(found[2])}}}", text)
    text = _QUOTIENT.sub(r"\\frac{\1}{\2}", text)
    text = _MIXED.sub(lambda found: f"{found[1].strip()}({found[2]}+{found[3]})", text)
    text = text.removeprefix("+")
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)


def _power_of_ten(found: re.Match[str]) -> str:
    """Return words of magnitude as a power of ten, before what else a command for text holds."""
    exponent = sum(_MAGNITUDES[word.rstrip("s")] for word in found[2].lower().split())
    return f"*10^{{{exponent}}}{found[1] or ''}"


def _fraction_of_repeating(found: re.Match[str]) -> str:
    """Return ``0.1\\overline{6}`` as the fraction of integers that it is."""
    whole, digits, repeated = found[1], found[2], found[3] or found[4]
    nines = 10 ** len(repeated) - 1
    value = Fraction(int((whole + digits) or 0) * nines + int(repeated), nines * 10 ** len(digits))
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _tight(text: str) -> str:
    """Remove blanks, except between a command and a letter, or between two digits."""
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])", r"\1\0", text)
    text = re.sub(r"(?<=\d) +(?=\d)", "\0", text)
    return text.replace(" ", "").replace("\0", " ")
