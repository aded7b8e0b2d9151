"""State of ``penstock top`` and the effects of keys. Pure: it reads neither Redis nor a terminal.

| key | does |
|---|---|
| 1 ... 4, tab | shows another list |
| up, down, k, j, page up, page down | moves |
| s, S | sorts by the next column, or the one before; r reverses the order |
| enter | opens the row; escape, backspace or left go back |
| q, Ctrl-C | ends |
"""

import os
import re
import select
import sys
import termios
import tty
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.console.details import detail_lines
from penstock.console.read.lanes import ready_line
from penstock.console.read.trainers import head_line
from penstock.console.resources import LISTS
from penstock.console.selection import order_of
from penstock.console.terminal import cell

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1bOC": "right", b"\x1bOD": "left", b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\x1b": "escape",
    b"\r": "enter", b"\n": "enter", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace", b"\x03": "ctrl-c",
}  # fmt: skip
#: Bytes read at once: held or pasted keys arrive together.
_MOST = 1024
#: One key: a sequence of a terminal, or a character of UTF-8.
_KEY = re.compile(rb"\x1b\[[0-9;]*[@-~]|\x1bO.|[\xc0-\xff][\x80-\xbf]+|.", re.DOTALL)


def keys_of(data: bytes) -> list[str]:
    """Decode bytes to keys: names, characters, or '' for a key without a meaning here."""
    return [_key_of(one) for one in _KEY.findall(data)]


def _key_of(data: bytes) -> str:
    if data in _SEQUENCES:
        return _SEQUENCES[data]
    text = data.decode(errors="ignore")
    return text if len(text) == 1 and text.isprintable() else ""


class Keyboard:
    """The terminal at standard input; a context manager, because the terminal's mode must be restored."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before = termios.tcgetattr(self._fd)
        #: Pressed keys that were not returned yet.
        self._pressed: deque[str] = deque()

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> str | None:
        """Return the next key, None after ``timeout_s`` seconds without one; ctrl-c if the terminal is gone. Blocks."""
        if not self._pressed and select.select([self._fd], [], [], timeout_s)[0]:
            try:
                data = os.read(self._fd, _MOST)
            except OSError:
                data = b""
            self._pressed.extend(keys_of(data) if data else ["ctrl-c"])
        return self._pressed.popleft() if self._pressed else None


#: The lists, by their names in ``LISTS``.
NAMES = ("workers", "jobs", "subs", "waits")

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
        return tuple(one.name for one in LISTS[self.name].shown)

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


#: Lines of a screen that are not the list's: head, lists, its own head, keys.
AROUND = 7
_KEYS = "1-4 tab list   up down move   s sort   r turn round   enter look into   escape back   q end"


def draw(
    screen: Screen, state: Mapping[str, Any], rows: Sequence[Row], about: Any, height: int, trouble: str = ""
) -> Group:
    """Render the complete screen.

    Args:
        state: snapshot of the run (``penstock.protocol.snapshot``).
        rows: rows of the list; already those of ``screen``.
        about: details of the opened row; None if none is open.
        height: lines of the terminal.
        trouble: why the data are out of date; '' if they are current.
    """
    room = max(3, height - AROUND)
    body = _details(screen, about, room) if screen.opened else _table(screen, rows, room)
    head = Text(cell(trouble), style="bold red") if trouble else _head(state)
    return Group(head, _counts(state), _lists(screen), body, Text(_KEYS, style="dim", no_wrap=True))


def _head(state: Mapping[str, Any]) -> Text:
    line = cell(f"  {head_line(state)}")
    return Text.assemble(("penstock ", "bold"), cell(state["run"]), line, no_wrap=True, overflow="ellipsis")


def _counts(state: Mapping[str, Any]) -> Text:
    lanes = [f"{lane} {one['queued']}+{one['leased']}" for lane, one in state["lanes"].items() if any(one.values())]
    paused = [f"{lane} paused" for lane in state["paused"]]
    rest = [f"delayed {state['delayed']}", f"dead {state['dead']}", ready_line(state)]
    speed = f"{sum(one.tokens_per_s for one in state['workers']):,.0f} tokens/s"
    return Text(cell("  ".join([*lanes, *paused, *rest, speed])), no_wrap=True, overflow="ellipsis")


def _lists(screen: Screen) -> Text:
    parts: list[Any] = []
    for number, name in enumerate(NAMES, 1):
        parts += [(f" {number} {name} ", "reverse" if name == screen.name else ""), " "]
    by = f"by {screen.sort}" if screen.sort else ""
    return Text.assemble(*parts, (f"{by}{' turned round' if screen.turned else ''}", "dim"), no_wrap=True)


def _table(screen: Screen, rows: Sequence[Row], room: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in screen.columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    ordered = screen.order(rows)
    first = max(0, min(screen.cursor - room // 2, len(ordered) - room))
    for index, row in enumerate(ordered[first : first + room], first):
        style = "reverse" if index == screen.cursor else ""
        table.add_row(*(Text(cell(column.cell(row))) for column in LISTS[screen.name].shown), style=style)
    return table


def _details(screen: Screen, about: Any, room: int) -> Group:
    lines = ["it does not exist any more"] if about is None else list(detail_lines(about, LISTS[screen.name]))
    more = [f"... {len(lines) - room + 1} more lines"] if len(lines) > room else []
    return Group(*(Text(cell(line), overflow="fold") for line in [*lines[: room - len(more)], *more]))
