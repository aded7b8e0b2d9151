"""``penstock top``: an interactive live view for a terminal."""

import sys
from typing import Annotated

import typer

from penstock.console.cli.target import Target
from penstock.errors import ConfigError


def top(
    target: Target, every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0
) -> None:
    """Watch a run: workers, jobs, subscriptions and waits, with keys to sort and to open one. q quits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`penstock top` needs a terminal; `penstock status --watch` works in a pipe too.")
    from penstock.console.top import Top

    Top(target, every).run()
