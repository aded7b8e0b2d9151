"""Render ``penstock top``: a head, the list or the opened row, and the keys."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.console.read.lanes import ready_line
from penstock.console.read.trainers import head_line
from penstock.console.terminal import cell, value_text
from penstock.console.top.screen import NAMES, Row, Screen

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
    body = _details(about, room) if screen.opened else _table(screen, rows, room)
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
        table.add_row(*(Text(cell(row.get(column))) for column in screen.columns), style=style)
    return table


def _details(about: Any, room: int) -> Group:
    lines = list(_lines(about)) if about is not None else ["it does not exist any more"]
    more = [f"... {len(lines) - room + 1} more lines"] if len(lines) > room else []
    return Group(*(Text(cell(line), overflow="fold") for line in [*lines[: room - len(more)], *more]))


def _lines(value: Mapping[str, Any]) -> Iterator[str]:
    for name, one in value.items():
        if isinstance(one, list) and one and isinstance(one[0], Mapping):
            yield f"{name}:"
            yield from (f"  {value_text(entry)}" for entry in one)
        elif one not in (None, "", [], {}):
            yield f"{name}: {value_text(one)}"
