"""How far something is: lines in a pipe that do not repeat themselves, a bar on a terminal, nothing for JSON."""

import io

import pytest
from rich.console import Console

from penstock.console.progress import LINE_EVERY_S, SAME_EVERY_S, Steps
from penstock.console.terminal import duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(clock: Clock, *, hidden: bool = False, terminal: bool = False) -> tuple[Steps, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    return Steps("exporting", 40, hidden=hidden, console=console, clock=clock), file


def test_what_is_counted_only_on_the_way_has_an_end_then() -> None:
    clock, file = Clock(), io.StringIO()
    steps = Steps("recounting groups", console=Console(file=file, width=120), clock=clock)
    clock.now = LINE_EVERY_S
    steps.at(10, total=30)
    assert file.getvalue() == "recounting groups: 10 of 30 (5 s, about 10 s left)\n"


def test_a_pipe_gets_a_line_now_and_then_with_what_is_left() -> None:
    clock = Clock()
    steps, file = lines(clock)
    with steps:
        steps.at(1)
        clock.now = LINE_EVERY_S
        steps.at(10, "of \x1b[2J")
        steps.at(11)
        clock.now += LINE_EVERY_S
        steps.at(10, "of \x1b[2J")
        clock.now += SAME_EVERY_S
        steps.at(10, "of \x1b[2J")
    assert file.getvalue() == (
        "exporting: 10 of 40 of \\x1b[2J (5 s, about 15 s left)\n"
        "exporting: 10 of 40 of \\x1b[2J (40 s, about 2 min left)\n"
    )


def test_a_terminal_gets_a_line_that_changes_and_whoever_wants_json_nothing() -> None:
    steps, file = lines(Clock(), terminal=True)
    with steps:
        steps.at(10, "[red]loading")
    assert "exporting: 10 of 40 [red]loading" in file.getvalue()
    for terminal in (True, False):
        clock = Clock()
        steps, file = lines(clock, hidden=True, terminal=terminal)
        with steps:
            clock.now = 100.0
            steps.at(10)
        assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0 s"), (4.25, "4.2 s"), (119, "119 s"), (120, "2 min"), (5340, "89 min"), (11100, "3 h 5 min")],
)
def test_a_time_that_is_left_has_no_more_digits_than_it_is_worth(seconds: float, said: str) -> None:
    assert duration(seconds) == said
