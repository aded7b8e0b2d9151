"""Print for people: tables without truncation, and a quiet end when the reader of a pipe exits.

| where | a table is |
|---|---|
| a pipe or a file | one line per row, columns aligned by blanks, as wide as needed |
| a terminal that is wide enough | a table with lines |
| one that is wide enough without the lines | as in a pipe |
| a narrower terminal | per row its first cell and then ``name value`` of all others, wrapped between them |
"""

import json
import os
import select
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.text import printable, to_plain

#: Characters of a text in a list.
EXCERPT = 60


class Terminal(Console):
    """A console that calls ``on_closed`` once when its reader exits, and prints nothing from then on."""

    def __init__(self, on_closed: Callable[[], None] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.on_closed = on_closed

    def on_broken_pipe(self) -> None:
        """Replace rich's handler, which would exit the process."""
        self.quiet = True
        hush()
        if self.on_closed is not None:
            self.on_closed()


def reader_left() -> bool:
    """Return whether the reader of standard output or error has exited (``| head``)."""
    return bool(_left())


def hush() -> None:
    """Redirect streams without a reader to the null device, since the interpreter flushes them at exit."""
    for number in _left():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _left() -> list[int]:
    left = []
    for number in (1, 2):
        poll = select.poll()
        poll.register(number, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            left.append(number)
    return left


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str], title: str, console: Console | None = None) -> None:
    """Print ``rows`` with these columns; the first names the row. No cell is cut."""
    console, title = console or Console(), cell(title)
    if not rows:
        _line(console, f"{title}: none")
        return
    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    widths = _widths(columns, cells)
    is_narrow = console.width < sum(widths) + 3 * len(widths) + 1
    if not console.is_terminal or (is_narrow and sum(widths) + 2 * (len(widths) - 1) <= console.width):
        _line(console, "\n".join([title, *aligned(rows, columns)]))
    elif not is_narrow:
        drawn = Table(*columns, title=Text(title, "table.title"), title_justify="left")
        for row in cells:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    else:
        _line(console, title)
        for first, *others in cells:
            said = [f"{name} {text}" for name, text in zip(columns[1:], others, strict=True) if text]
            _line(console, _records(first, said, console.width))


def aligned(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return a heading and a line per row; an empty cell is a dash, or programs that split the line would miss it."""
    cells = [[cell(row.get(column, "")) or "-" for column in columns] for row in rows]
    widths = _widths(columns, cells)
    padded = ([text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)]
              for row in [columns, *cells])  # fmt: skip
    return ["  ".join(row).rstrip() for row in padded]


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]


def _records(first: str, said: Sequence[str], width: int) -> str:
    """Put ``first`` on a line, then the others, broken only between them if they fit."""
    lines: list[str] = []
    for one in said:
        if lines and cell_len(lines[-1]) + cell_len(one) + 4 <= width:
            lines[-1] += f", {one}"
        else:
            lines.append(one)
    return "\n".join([first, *(textwrap.indent(line, "  ") for line in lines)])


def _line(console: Console, text: str) -> None:
    # Job ids, paths and reasons are neither markup nor to be highlighted.
    console.print(Text(text), soft_wrap=True)


def cell(value: Any) -> str:
    """Format ``value`` on one line: numbers short, no control characters."""
    if value is None:
        return "-"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else " " for c in text)


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people. All output goes through here or ``table``, since some of it is untrusted text."""
    typer.echo(printable(text), err=err)


def excerpt(text: str) -> str:
    """Return the beginning of a text, on one line, without terminal control characters."""
    line = printable(" ".join(text[: 4 * EXCERPT].split()))
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def duration(seconds: float) -> str:
    """Format a length of time: ``0.4 s``, ``40 s``, ``12 min``, ``3 h 5 min``."""
    if 0 < seconds < 10:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def flush() -> None:
    """Flush the output, so that a reader's exit is noticed here and not when the interpreter exits."""
    sys.stdout.flush()
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """Print as JSON; unprintable characters are escaped."""
    text = json_bytes(value, orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode()
    typer.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


#: Most values and characters of a value that has no JSON form.
MOST = 2**24


def json_bytes(value: Any, option: int = 0) -> bytes:
    """Encode ``value`` as UTF-8 JSON. What has no JSON form (bytes, deep nesting, lone surrogates) becomes text.

    Args:
        option: of ``orjson.dumps``.

    Raises:
        penstock.text.TooMuch: the value has no JSON form and is larger than ``MOST``.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(to_plain(value, MOST), option=option)
