"""Select rows of a list: filter, sort, and take a page; on the command line and on the page."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

#: Rows shown as text by default.
SHOWN = 50

Row = Mapping[str, Any]

_CONDITION = re.compile(r"([\w.]+?)(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Filter, order and format of the rows, from the options that every list has."""

    where: Sequence[str] = ()
    sort: str | None = None
    limit: int | None = None
    as_json: bool = False
    #: Number of rows to skip.
    after: int = 0

    def page(self, chosen: Sequence[Row]) -> Sequence[Row]:
        """Return the page of the selected rows."""
        count = self.limit or (len(chosen) if self.as_json else SHOWN)
        return chosen[self.after : self.after + count]


def select(rows: Sequence[Row], fields: Sequence[str], choice: Choice) -> list[Row]:
    """Return the rows that pass every filter, in order, without the limit.

    Raises:
        ConfigError: a filter or the sort order names an unknown field, or is malformed.
    """
    conditions = [_condition(one, fields) for one in choice.where]
    found = [row for row in rows if all(holds(row) for holds in conditions)]
    if choice.sort is None:
        return found
    name = choice.sort.removeprefix("-")
    _check_field("--sort", choice.sort, name, fields)
    return sorted(found, key=lambda row: order_of(row.get(name)), reverse=choice.sort.startswith("-"))


def order_of(value: Any) -> tuple[Any, ...]:
    """Return a sort key for any value: None, then numbers, then texts, with numbers in them compared by value."""
    if value is None:
        return (0,)
    if isinstance(value, int | float):
        return (1, value)
    parts = re.split(r"([0-9]{1,18})", str(value))
    return (2, *((0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts)))


def _condition(text: str, fields: Sequence[str]) -> Callable[[Row], bool]:
    name, relation, wanted = parts_of(text)
    _check_field("--where", text, name, fields)
    return lambda row: _holds(row.get(name), relation, wanted)


def parts_of(text: str) -> tuple[str, str, str]:
    """Split a condition into field, relation and value. Raises ConfigError."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ConfigError(f"invalid --where {text!r}: give FIELD=VALUE, FIELD!=VALUE or FIELD~PART.")
    return found[1], found[2], found[3]


def _check_field(option: str, given: str, name: str, fields: Sequence[str]) -> None:
    if name not in fields:
        raise ConfigError(f"{option} {given!r}: these rows have no field {name!r}, but {', '.join(fields)}.")


def _holds(value: Any, relation: str, wanted: str) -> bool:
    if relation == "~":
        return wanted in _text(value)
    number = _number(wanted)
    if isinstance(value, int | float) and number is not None:
        return _COMPARE[relation](value, number)
    if relation in ("=", "!="):
        return _COMPARE[relation](_text(value), wanted)
    return value is not None and _COMPARE[relation](order_of(_text(value)), order_of(wanted))


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
