"""State of ``penstock top`` and the effects of keys. Pure: it reads neither Redis nor a terminal.

| key | does |
|---|---|
| 1 ... 4, tab | shows another list |
| up, down, k, j, page up, page down | moves |
| s, S | sorts by the next column, or the one before; r reverses the order |
| enter | opens the row; escape, backspace or left go back |
| q, Ctrl-C | ends |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.console.cli.lists import order_of

#: List -> its columns; the first names the row.
LISTS: Mapping[str, tuple[str, ...]] = {
    "workers": ("name", "state", "version", "held", "running", "slots", "tokens_per_s", "age_s", "why"),
    "jobs": ("job", "state", "lane", "committed", "n", "not_before", "version", "attempts", "crashes", "worker"),
    "subscriptions": ("name", "mode", "bound", "cut", "cursor", "ckpt", "disposed", "owned"),
    "waits": ("who", "since_s", "what"),
}
NAMES = tuple(LISTS)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Screen:
    """The current list, its order, the row under the cursor, and whether that is open."""

    name: str = NAMES[0]
    #: Column that the list is sorted by; '': unsorted.
    sort: str = ""
    turned: bool = False
    cursor: int = 0
    #: Name of the opened row; '': none.
    opened: str = ""
    ended: bool = False
    #: Names of the rows in the order in which they were last shown.
    shown: tuple[str, ...] = field(default=())

    @property
    def columns(self) -> tuple[str, ...]:
        return LISTS[self.name]

    def order(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows in display order."""
        if not self.sort:
            return list(rows[::-1] if self.turned else rows)
        return sorted(rows, key=lambda row: order_of(row.get(self.sort)), reverse=self.turned)

    def with_rows(self, rows: Sequence[Row]) -> "Screen":
        """Return this screen for new rows: the cursor stays in the list."""
        names = tuple(str(row.get(self.columns[0], "")) for row in self.order(rows))
        return replace(self, shown=names, cursor=max(0, min(self.cursor, len(names) - 1)))

    def press(self, key: str, page: int = 10) -> "Screen":
        """Return the screen after a key; an unknown key changes nothing. ``page``: rows of a page."""
        if key in ("q", "ctrl-c"):
            return replace(self, ended=True)
        if key in ("escape", "backspace", "left"):
            return replace(self, opened="")
        if key in _NUMBERS:
            return Screen(NAMES[_NUMBERS[key]])
        if key == "tab":
            return Screen(NAMES[(NAMES.index(self.name) + 1) % len(NAMES)])
        if key in ("enter", "right"):
            return replace(self, opened=self.shown[self.cursor]) if self.shown else self
        if key in ("s", "S"):
            return replace(self, sort=self._next_column(1 if key == "s" else -1))
        if key == "r":
            return replace(self, turned=not self.turned)
        return self._move({"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}.get(key, 0))

    def _next_column(self, by: int) -> str:
        places = ("", *self.columns)
        return places[(places.index(self.sort) + by) % len(places)]

    def _move(self, by: int) -> "Screen":
        return replace(self, cursor=max(0, min(self.cursor + by, len(self.shown) - 1)))


_NUMBERS = {str(number): index for index, number in enumerate(range(1, len(NAMES) + 1))}
