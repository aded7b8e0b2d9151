"""``penstock top``: what keys do to the screen, and that it is drawn whatever the records say."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from penstock.console.resources import LISTS
from penstock.console.top import AROUND, NAMES, Screen, draw, keys_of
from penstock.protocol.presence import WorkerPresence

HOSTILE = "\x1b[2J\u202e[/red]"
STATE: dict[str, Any] = {
    "run": "demo",
    "mode": "async",
    "bound": 1,
    "version": 3,
    "step": 2,
    "lanes": {"train": {"queued": 5, "leased": 2}, "eval": {"queued": 0, "leased": 0}},
    "paused": ["eval"],
    "delayed": 0,
    "dead": 1,
    "ready": 4,
    "workers": [WorkerPresence(name="w1", tokens_per_s=10.0)],
}
ROWS = [{"name": f"w{i}", "state": "serving", "leased": 30 - i, "why": ""} for i in range(30)]


def press(keys: Sequence[str], rows: Sequence[dict[str, Any]] = ROWS) -> Screen:
    screen = Screen().with_rows(rows)
    for key in keys:
        screen = screen.press(key).with_rows(rows)
    return screen


def drawn(
    screen: Screen, rows: Sequence[dict[str, Any]] = ROWS, about: Any = None, height: int = 20, width: int = 120
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(draw(screen, STATE, rows, about, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("keys", "name", "cursor", "sort", "opened"),
    [
        ([], "workers", 0, "", ""),
        (["down", "j", "j", "k"], "workers", 2, "", ""),
        (["up"], "workers", 0, "", ""),
        (["pagedown"] * 9, "workers", 29, "", ""),
        (["s", "s"], "workers", 0, "version", ""),
        (["s", "S"], "workers", 0, "", ""),
        (["down", "enter"], "workers", 1, "", "w1"),
        (["down", "enter", "escape"], "workers", 1, "", ""),
        (["down", "s", "tab"], "jobs", 0, "", ""),
        (["4"], "waits", 0, "", ""),
        (["tab"] * len(NAMES), "workers", 0, "", ""),
        (["x", ""], "workers", 0, "", ""),
    ],
)
def test_keys_choose_the_list_the_order_and_the_row(
    keys: list[str], name: str, cursor: int, sort: str, opened: str
) -> None:
    screen = press(keys)
    assert (screen.name, screen.cursor, screen.sort, screen.opened, screen.ended) == (name, cursor, sort, opened, False)


def test_q_and_ctrl_c_end_it() -> None:
    assert press(["q"]).ended
    assert press(["ctrl-c"]).ended


def test_the_row_under_the_cursor_is_the_one_that_is_shown_there() -> None:
    screen = press(["s", "s", "s", "s", "enter"])  # by leased
    assert (screen.sort, screen.opened) == ("leased", "w29")
    assert press(["s", "s", "s", "s", "r", "enter"]).opened == "w0"
    assert press(["enter"], []).opened == ""
    assert press(["pagedown", "pagedown"]).with_rows(ROWS[:3]).cursor == 2, "the list became shorter"


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"s\r", ["s", "enter"]),
        (b"q", ["q"]),
        (b"\x03", ["ctrl-c"]),
        (b"\x1b[19~j", ["", "j"]),
        (b"\x1b", ["escape"]),
        ("\u00e4s".encode() + b"\xff", ["\u00e4", "s", ""]),
    ],
)
def test_bytes_of_a_terminal_are_keys_also_where_many_come_together(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def test_the_screen_has_the_run_its_queues_and_the_list_and_never_more_lines_than_there_are() -> None:
    for height in (12, 20, 60):
        lines = drawn(press(["pagedown", "pagedown"]), height=height)
        assert len(lines) <= height
        text = "\n".join(lines)
        for words in ("penstock demo", "async, bound 1", "train 5+2", "eval paused", "dead 1", "w20", "q end"):
            assert words in text
    assert sum("serving" in line for line in drawn(Screen(), height=20)) == 20 - AROUND


def test_what_is_looked_into_is_shown_by_its_fields_and_cut_by_the_screen() -> None:
    about = {"job": "d/0/1", "samples": [{"k": k} for k in range(50)], "empty": [], "record": {"prompt": HOSTILE}}
    lines = drawn(press(["enter"]), about=about, height=20)
    assert "job: d/0/1" in lines[3]
    assert "more lines" in "\n".join(lines)
    assert len(lines) <= 20
    assert "it does not exist any more" in "\n".join(drawn(press(["enter"])))


def test_hostile_text_is_drawn_harmlessly() -> None:
    for name in NAMES:
        rows = [dict.fromkeys((one.name for one in LISTS[name].shown), HOSTILE)]
        for about in (None, {"name": HOSTILE, "more": [{"x": HOSTILE}]}):
            opened = HOSTILE if about else ""
            screen = Screen(name, opened=opened).with_rows(rows)
            text = "\n".join(drawn(screen, rows, about, width=300))
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "[/red]" in text
