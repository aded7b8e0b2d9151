"""``penstock top``: an interactive live view for a terminal."""

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.confirm import DIRECTORY, FolderOption, RunArgument, UrlOption
from penstock.console.cli.target import Target
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.console.top import Keyboard, Row, Screen

#: Seconds between two reads of the job list, which may be long; the rest is read every ``--every``.
JOBS_EVERY_S = 5.0


def top(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a run: workers, jobs, subscriptions and waits, with keys to sort and to open one. q quits."""
    from rich.console import Console
    from rich.live import Live

    from penstock.console.top import AROUND, Keyboard, Screen, draw

    console = Console()
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError("`penstock top` needs a terminal; `penstock status --watch` works in a pipe too.")
    view, screen = _View(Target(run, redis, directory)), Screen()
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        due = 0.0
        while not screen.ended:
            if time.monotonic() >= due:
                view.look(screen)
                due = time.monotonic() + every
            screen = screen.with_rows(view.rows(screen))
            drawn = draw(screen, view.state, view.rows(screen), view.about(screen), console.height, view.trouble)
            live.update(drawn, refresh=True)
            pressed = _press(screen, keyboard, due, max(1, console.height - AROUND))
            if (pressed.name, pressed.opened) != (screen.name, screen.opened):
                due = 0.0  # read the new view at once
            screen = pressed


def _press(screen: "Screen", keyboard: "Keyboard", due: float, page: int) -> "Screen":
    """Return the screen after the next key that changes it, or unchanged when a refresh is ``due``. Blocks."""
    while (key := keyboard.read(max(0.0, due - time.monotonic()))) is not None:
        if (pressed := screen.press(key, page)) != screen:
            return pressed
    return screen


class _View:
    """The data last read of a run. Raises PenstockError if the first read fails."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.state: dict[str, Any] = {}
        #: Why the data are out of date; '' if they are current.
        self.trouble = ""
        self._jobs: list[Row] = []
        self._jobs_due = 0.0
        self._about: tuple[str, Any] = ("", None)

    def look(self, screen: "Screen") -> None:
        """Read the data of the screen; keep the old ones if Redis does not answer. Blocks."""
        from redis.exceptions import RedisError

        from penstock.redis.connect import translate

        try:
            self._look(screen)
            self.trouble = ""
        except RedisError as exc:
            told = translate(exc, self._target.url)
            if not self.state:
                raise told from exc
            self.trouble = str(told)

    def _look(self, screen: "Screen") -> None:
        from penstock.console.read.jobs import list_jobs
        from penstock.protocol.snapshot import snapshot

        client, keys = self._target.client, self._target.keys
        self.state = snapshot(client, keys)
        if screen.name == "jobs" and time.monotonic() >= self._jobs_due:
            self._jobs = list(list_jobs(client, keys))
            self._jobs_due = time.monotonic() + JOBS_EVERY_S
        self._about = (screen.opened, self._read(screen)) if screen.opened else ("", None)

    def rows(self, screen: "Screen") -> "list[Row]":
        """Return the rows of the screen's list."""
        match screen.name:
            case "workers":
                return [asdict(one) for one in self.state["workers"]]
            case "jobs":
                return self._jobs
            case "subscriptions":
                return list(self.state["subs"])
        return list(self.state["waits"])

    def about(self, screen: "Screen") -> Any:
        """Return the details of the opened row."""
        name, about = self._about
        return about if name == screen.opened else None

    def _read(self, screen: "Screen") -> Any:
        from penstock.console.read.jobs import read_job
        from penstock.console.read.workers import read_worker

        client, keys = self._target.client, self._target.keys
        match screen.name:
            case "workers":
                return read_worker(client, keys, screen.opened)
            case "jobs":
                return read_job(client, keys, screen.opened)
        first = screen.columns[0]
        return next((row for row in self.rows(screen) if row.get(first) == screen.opened), None)


def register(app: typer.Typer) -> None:
    """Add the command to ``penstock``."""
    app.command()(top)
