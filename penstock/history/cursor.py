"""The position after which the next page of rows begins: a value and a row.

So rows that are written meanwhile do not shift pages.
"""

import math
import re
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.history.filters import COLUMNS, Clause, Sort
from penstock.history.part import PartName

_TEXT = re.compile(r"([a-z]+):([^:]{1,32}):([0-9]{1,10})-([0-9]{1,6}):([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Place:
    """A row in a sort order. Rows with equal values are ordered by file, then by number."""

    value: float
    part: PartName
    number: int

    def text(self, sort: Sort) -> str:
        """Return the position as text, which :func:`place_of` parses."""
        return f"{sort}:{self.value!r}:{self.part.epoch}-{self.part.number}:{self.number}"


def place_of(text: str, sort: Sort) -> Place:
    """Parse a position; raise ConfigError if ``text`` is not one of this order."""
    found = _TEXT.fullmatch(text)
    try:
        if found is None or found[1] != sort:
            raise ValueError
        value = float(found[2])
        if math.isnan(value):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{text!r} is no place in the order of {sort}: give --after what the page before ended with, and the same "
            "--sort."
        ) from None
    return Place(value, PartName(int(found[3]), int(found[4])), int(found[5]))


def beyond(place: Place | None, part: PartName, sort: Sort, *, ascending: bool, number: str = "s") -> Clause | None:
    """Return the condition for rows of ``part`` after ``place``; None if it has none."""
    column, less = COLUMNS[sort][0], ">" if ascending else "<"
    if place is None:
        return Clause("reward IS NOT NULL", ()) if sort is Sort.REWARD else Clause("1", ())
    if sort is Sort.RECORDED:
        if part == place.part:
            return Clause(f"{number} {less} ?", (place.number,))
        return Clause("1", ()) if (part > place.part) is ascending else None
    if part == place.part:
        return Clause(f"({column}, s) {less} (?, ?)", (place.value, place.number))
    return Clause(f"{column} {less}{'=' if (part > place.part) is ascending else ''} ?", (place.value,))
