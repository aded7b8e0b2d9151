"""Units behind an answer: ``12\\text{ in}``, ``\\$5``, ``45^\\circ``, ``30 cm^2``.

A unit is split off its number. Two units that are known and differ make an answer wrong; an unknown unit is ignored.
"""

import re

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
    """Return an answer without the units behind it, and the unit; '' if it has none, or an unknown one."""
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
