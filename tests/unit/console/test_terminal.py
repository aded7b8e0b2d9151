"""Tables: nothing is cut, in a pipe and on a narrow terminal; a reader that left is told once."""

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.config import Config
from penstock.console.launch.live import Live
from penstock.console.terminal import print_json, say, table
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.waits import describe
from penstock.records.worker_causes import EngineStarting
from penstock.system import logs
from tests.closed_pipe import run_without_a_reader

JOB = "a-dataset-with-a-long-name/1234/1234567"
ROWS: list[dict[str, Any]] = [
    {"job": JOB, "state": "leased", "worker": "host-name-of-a-node-in-a-cluster-0017-12345", "n": 8, "rate": 0.123456},
    {"job": "d/0/1", "state": "dead", "worker": None, "n": 16, "rate": 2.0},
]
COLUMNS = ["job", "state", "worker", "n", "rate"]


def printed(width: int, terminal: bool, rows: list[dict[str, Any]] = ROWS) -> list[str]:
    out = io.StringIO()
    table(rows, COLUMNS, "jobs", Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 40, 300])
def test_in_a_pipe_a_row_is_a_line_that_awk_can_split(width: int) -> None:
    title, head, first, second = printed(width, terminal=False)

    assert title == "jobs"
    assert head.split() == COLUMNS
    assert first.split() == [JOB, "leased", ROWS[0]["worker"], "8", "0.123"]
    assert second.split() == ["d/0/1", "dead", "-", "16", "2"]
    assert first.index("leased") == second.index("dead") == head.index("state")


def test_an_empty_cell_moves_no_column_of_a_pipe() -> None:
    rows = [{"job": "d/0/1", "state": "dead", "worker": "", "n": 16}]

    assert printed(80, terminal=False, rows=rows)[2].split() == ["d/0/1", "dead", "-", "16", "-"]


def test_a_table_that_fits_a_terminal_without_its_lines_is_one() -> None:
    rows = [{"job": "d" * 20, "state": "s" * 20, "worker": "w" * 20, "n": 8, "rate": 1.0}]
    wide, fits, narrow = (printed(width, terminal=True, rows=rows) for width in (85, 80, 72))

    assert len(wide) > len(fits) == 3
    assert fits == printed(80, terminal=False, rows=rows)
    assert narrow[1] == "d" * 20


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_on_a_terminal_no_job_id_and_no_name_is_cut(width: int) -> None:
    lines = printed(width, terminal=True)

    assert any(JOB in line for line in lines)
    assert any(str(ROWS[0]["worker"]) in line for line in lines)
    assert not any("…" in line for line in lines)


def test_words_of_others_are_neither_markup_nor_control() -> None:
    rows = [{"job": "[/red] [bold]x", "state": "a\nb\x1b[2J", "worker": "", "n": 1, "rate": 1.0}]

    for terminal in (False, True):
        text = "\n".join(printed(80, terminal, rows))
        assert "[/red] [bold]x" in text
        assert "\x1b[2J" not in text
        assert "a b" in text


def test_no_rows_are_told_as_such() -> None:
    assert printed(80, False, []) == ["jobs: none"]


def test_a_reader_that_left_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    code = (
        "from penstock.console.terminal import Terminal\n"
        "left = []\n"
        "console = Terminal(on_closed=lambda: left.append(1))\n"
        "for _ in range(3): console.print('x')\n"
        "open('left', 'w').write(str(len(left)))\n"
    )
    done = run_without_a_reader(["-c", code], tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "left").read_text() == "1"


#: What a terminal would obey, or show in another order than it stands: a title, colours, the 8-bit escape, carriage
#: return, right-to-left marks.
HOSTILE = "\x1b]0;PWNED\x07\x1b[31m\x9b2J\rover\u202etxt\u2066"


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_what_is_said_moves_no_cursor_and_turns_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"a\tb\r\n{HOSTILE}c\xa0d")
    say(HOSTILE, err=True)

    out, err = capsys.readouterr()
    assert out == "a\tb\n\\x1b]0;PWNED\\x07\\x1b[31m\\x9b2J\\rover\\u202etxt\\u2066c d\n"
    assert is_plain(err)


def test_json_says_the_same_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"why": HOSTILE + "\U000e0001 \u00e4"})

    out = capsys.readouterr().out
    assert is_plain(out)
    assert json.loads(out) == {"why": HOSTILE + "\U000e0001 \u00e4"}


def test_an_entry_of_a_log_is_as_plain() -> None:
    record = logging.LogRecord("penstock", logging.WARNING, "", 0, "worker %s\nis gone", (HOSTILE,), None)

    text = logs.formatter("buffer").format(record)
    assert is_plain(text)
    assert text.endswith("\nis gone")


def test_the_live_view_is_as_plain() -> None:
    seen = {
        "workers": [WorkerPresence(name=HOSTILE, state=HOSTILE)],
        "waits": [{"who": HOSTILE, "since_s": 5.0, **describe(EngineStarting())}],
        "parts": [],
        "subs": [],
    }
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=200, force_terminal=terminal, color_system=None)
        config = Config.model_validate(
            {"run": "a", "model": {"name": "m", "path": "m"}, "data": {"train": [{"name": "d", "path": "d"}]}}
        )
        live = Live(config, console)
        live.event(HOSTILE)
        with live:
            live.update(seen)
        assert is_plain(re.sub(r"\x1b\[[?0-9]*[A-Za-z]|\r", "", out.getvalue())), "but for what moves the cursor"


def test_every_command_speaks_through_one_place() -> None:
    """What a command prints by itself reaches the terminal as others wrote it."""
    for file in sorted((Path(__file__).parents[3] / "console" / "cli").glob("*.py")):
        assert not re.search(r"\b(typer\.echo|print)\(", file.read_text()), f"{file.name}: say() or table()"
