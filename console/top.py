"""The screen of ``penstock top``: the lists of a run, and one row of them in detail.

| key | does |
|---|---|
| 1 ... 4, tab | shows another list |
| up, down, k, j, page up, page down | moves |
| s, S | sorts by the next column, or the one before; r reverses the order |
| enter | opens the row; escape, backspace or left go back |
| q, Ctrl-C | ends |
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from redis.exceptions import RedisError
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from penstock.console.cli.target import Target
from penstock.console.details import detail_lines
from penstock.console.read.lanes import ready_line
from penstock.console.read.parts import head_line
from penstock.console.resources import LISTS, Row
from penstock.console.selection import order_of
from penstock.console.terminal import cell
from penstock.protocol.snapshot import snapshot
from penstock.redis.connect import translate

#: The lists, by their names in ``LISTS``.
NAMES = ("workers", "jobs", "subs", "waits")
#: Seconds between two reads of the job list, which may be long; the rest is read at each refresh.
JOBS_EVERY_S = 5.0


class Top(App[None]):
    """The application. Its first read happens in the constructor, which raises redis' errors.

    Args:
        every_s: seconds between two reads.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "#details { display: none; } .opened #details { display: block; } .opened DataTable { display: none; }"
    BINDINGS: ClassVar = [
        *(Binding(str(number), f"list('{name}')", name) for number, name in enumerate(NAMES, 1)),
        Binding("tab", "next", "next list", priority=True),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("k", "move(-1)", show=False),
        Binding("j", "move(1)", show=False),
        Binding("escape,backspace,left", "close", "back"),
        Binding("q", "quit", "end"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, target: Target, every_s: float) -> None:
        super().__init__()
        self._target, self._every_s = target, every_s
        self.list_name, self.sort, self.reversed, self.opened = NAMES[0], "", False, ""
        self._state: Mapping[str, Any] = {}
        self._rows: list[Row] = []
        self._about: Any = None
        self._read_at: tuple[str, float] = ("", 0.0)
        self._trouble = ""
        self._read()

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield DataTable(cursor_type="row")
        with VerticalScroll(id="details"):
            yield Static(id="about", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._every_s, self.look)
        self.query_one(DataTable).focus()
        self._draw()

    def look(self) -> None:
        """Read the data again in a thread, then draw them."""
        self.run_worker(self._look, thread=True, exclusive=True)

    def _look(self) -> None:
        try:
            self._read()
            self._trouble = ""
        except RedisError as exc:
            self._trouble = str(translate(exc, self._target.url))
        self.call_from_thread(self._draw)

    def _read(self) -> None:
        client, keys = self._target.client, self._target.keys
        name, opened, resource = self.list_name, self.opened, LISTS[self.list_name]
        self._state = snapshot(client, keys)
        before, at = self._read_at
        if name != "jobs" or before != name or time.monotonic() >= at + JOBS_EVERY_S:
            self._rows, self._read_at = resource.rows(client, keys), (name, time.monotonic())
        if opened and resource.one:
            self._about = resource.details(client, keys, opened)
        elif opened:
            self._about = next((row for row in self._rows if row.get(resource.key[0]) == opened), None)

    def _draw(self) -> None:
        order = f", by {self.sort or 'the order read'}{', reversed' if self.reversed else ''}"
        head = self._trouble or f"penstock {self._state['run']}  {head_line(self._state)}"
        self.query_one("#head", Static).update(
            "\n".join(map(cell, (head, counts(self._state), self.list_name + order)))
        )
        self.set_class(bool(self.opened), "opened")
        lines = ["it does not exist any more"] if self._about is None else detail_lines(self._about, self._resource)
        self.query_one("#about", Static).update("\n".join(map(cell, lines)))
        if self._read_at[0] != self.list_name:
            return  # the rows are of the list before
        table, row = self.query_one(DataTable), self.query_one(DataTable).cursor_row
        table.clear(columns=True)
        table.add_columns(*self.columns)
        for one in self.ordered(self._rows):
            table.add_row(*(Text(cell(column.cell(one))) for column in self._resource.shown),
                          key=str(one.get(self.columns[0])) if self.list_name != "waits" else None)  # fmt: skip
        table.move_cursor(row=row)

    @property
    def _resource(self) -> Any:
        return LISTS[self.list_name]

    @property
    def columns(self) -> list[str]:
        return [one.name for one in self._resource.shown]

    def ordered(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows in display order."""
        if not self.sort:
            return list(rows[::-1] if self.reversed else rows)
        return sorted(rows, key=lambda row: order_of(row.get(self.sort)), reverse=self.reversed)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.opened = str(self.ordered(self._rows)[event.cursor_row].get(self.columns[0]))
        self._about = {}
        self.look()

    def action_list(self, name: str) -> None:
        self.list_name, self.sort, self.reversed, self.opened = name, LISTS[name].sort or "", False, ""
        self.look()

    def action_next(self) -> None:
        self.action_list(NAMES[(NAMES.index(self.list_name) + 1) % len(NAMES)])

    def action_sort(self, by: int) -> None:
        places = ("", *self.columns)
        self.sort = places[(places.index(self.sort) + by) % len(places)]
        self._draw()

    def action_reverse(self) -> None:
        self.reversed = not self.reversed
        self._draw()

    def action_move(self, by: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=table.cursor_row + by)

    def action_close(self) -> None:
        self.opened = ""
        self._draw()


def counts(state: Mapping[str, Any]) -> str:
    """Return the counts of a snapshot's lanes and groups, on one line."""
    lanes = [f"{lane} {one['queued']}+{one['leased']}" for lane, one in state["lanes"].items() if any(one.values())]
    paused = [f"{lane} paused" for lane in state["paused"]]
    speed = f"{sum(one.tokens_per_s for one in state['workers']):,.0f} tokens/s"
    return "  ".join(
        [*lanes, *paused, f"delayed {state['delayed']}", f"dead {state['dead']}", ready_line(state), speed]
    )
