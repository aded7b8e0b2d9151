"""What cannot be taken back is asked about where a person sits there; ``--yes`` answers, ``--dry-run`` only looks.

| stdin and stderr are | without ``--yes`` |
|---|---|
| a terminal | it asks; anything but yes ends it with exit code 1, nothing changed |
| else | verbs that scripts have always called go on; ``must_say`` ones are refused with exit code 2. None waits |
"""

import getpass
import os
import sys
from typing import Annotated, Any

import typer

from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError
from penstock.text import printable

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]


def agree(what: str, *, yes: bool, must_say: bool = False) -> None:
    """Return where ``what`` (a sentence without its end: ``cancel 3 jobs``) may be done. Blocks while a person thinks.

    Raises:
        ConfigError: nobody can be asked, and ``must_say``.
        typer.Exit: the person said no.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if must_say:
            raise ConfigError(f"This would {what}, and nobody is there to be asked: give --yes, or --dry-run to look.")
        return
    if not typer.confirm(printable(f"{what[0].upper()}{what[1:]}?"), err=True):
        say("nothing was changed", err=True)
        raise typer.Exit(1)


def goes_on(what: str, record: Any, *, yes: bool, dry_run: bool, as_json: bool) -> bool:
    """Whether ``what`` is to be done, as ``agree`` has it; with ``dry_run`` it is told and not done.

    Args:
        record: what would be done, as JSON.
    """
    if dry_run:
        told(f"would {what}", record, as_json)
        return False
    agree(what, yes=yes)
    return True


def told(text: str, record: Any, as_json: bool) -> None:
    """Print what was done in words, or the record of it."""
    print_json(record) if as_json else say(text)


def many(count: int, noun: str) -> str:
    """``1 job``, ``3 jobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def operator() -> str:
    """Who changes something by hand, for those who wonder."""
    try:
        return f"operator {getpass.getuser()}"
    except (KeyError, OSError):  # a container without an entry of its user
        return f"operator with uid {os.getuid()}"
