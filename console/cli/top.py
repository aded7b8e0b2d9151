"""``penstock top``: an interactive live view for a terminal."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import command
from penstock.console.cli.target import Target
from penstock.console.resources import LISTS
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.console.top import Row, Screen

#: Seconds between two reads of the job list, which may be long; the rest is read every ``--every``.
JOBS_EVERY_S = 5.0


def top(
    target: Target, every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0
) -> None:
    """Watch a run: workers, jobs, subscriptions and waits, with keys to sort and to open one. q quits."""
    from rich.console import Console
    from rich.live import Live

    from penstock.console.top import AROUND, Keyboard, Screen, draw

    console = Console()
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError("`penstock top` needs a terminal; `penstock status --watch` works in a pipe too.")
    view, screen = _View(target), Screen()
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        due = 0.0
        while not screen.ended:
            if time.monotonic() >= due:
                view.look(screen)
                due = time.monotonic() + every
            screen = screen.with_rows(view.rows)
            live.update(draw(screen, view.state, view.rows, view.about, console.height, view.trouble), refresh=True)
            while (key := keyboard.read(max(0.0, due - time.monotonic()))) is not None:
                pressed = screen.press(key, max(1, console.height - AROUND))
                if pressed != screen:
                    # Read a new view at once.
                    due = due if (pressed.name, pressed.opened) == (screen.name, screen.opened) else 0.0
                    screen = pressed
                    break


class _View:
    """The data last read of a run. Raises PenstockError if the first read fails."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.state: dict[str, Any] = {}
        #: Why the data are out of date; '' if they are current.
        self.trouble = ""
        self.rows: list[Row] = []
        #: Details of the opened row; None if it does not exist.
        self.about: Any = None
        self._read = ("", 0.0)

    def look(self, screen: "Screen") -> None:
        """Read the data of the screen; keep the old ones if Redis does not answer. Blocks."""
        from redis.exceptions import RedisError

        from penstock.protocol.snapshot import snapshot
        from penstock.redis.connect import translate

        client, keys = self._target.client, self._target.keys
        resource = LISTS[screen.name]
        try:
            self.state = snapshot(client, keys)
            read, at = self._read
            if read != screen.name or screen.name != "jobs" or time.monotonic() >= at + JOBS_EVERY_S:
                self.rows = resource.rows(client, keys)
                self._read = (screen.name, time.monotonic())
            if screen.opened and resource.one:
                self.about = resource.details(client, keys, screen.opened)
            elif screen.opened:
                self.about = next((row for row in self.rows if row[resource.key[0]] == screen.opened), None)
            self.trouble = ""
        except RedisError as exc:
            reason = translate(exc, self._target.url)
            if not self.state:
                raise reason from exc
            self.trouble = str(reason)


def register(app: typer.Typer) -> None:
    """Add the command to ``penstock``."""
    command(app)(top)
