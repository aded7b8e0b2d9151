"""Ask for confirmation of irreversible changes on a terminal; ``--yes`` confirms, ``--dry-run`` only reports.

| stdin and stderr are | without ``--yes`` |
|---|---|
| a terminal | it asks; anything but yes ends it with exit code 1, nothing changed |
| else | commands that scripts have always called proceed; ``must_say`` ones fail with exit code 2. None waits |
"""

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError
from penstock.system.logs import LogFormat
from penstock.text import printable

UrlOption = Annotated[
    str | None, typer.Option("--redis", "--redis.url", help="Redis URL; default: what the run's folder says.")
]
FolderOption = Annotated[Path, typer.Option("--directory", help="Folder of the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[
    str | None,
    typer.Option(
        "--run", help="Name of the run; default: the newest under --directory.", autocompletion=completion.runs
    ),
]
DIRECTORY = Path("runs")

#: Unknown options of a command are configuration overrides.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
#: Sets logs.format, by ``overrides_of``.
LogFormatOption = Annotated[
    LogFormat | None, typer.Option("--log-format", help="How the log is written; default: what the file says.")
]
ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="YAML file of the run.")]
#: Sets redis.url, by ``overrides_of``: same names as the option of commands that inspect a run.
RedisOption = Annotated[
    str | None, typer.Option("--redis", "--redis.url", metavar="URL", help="Redis URL; default: what the file says.")
]


YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]


def agree(what: str, *, yes: bool, must_say: bool = False) -> None:
    """Return if ``what`` (a phrase such as ``cancel 3 jobs``) may be done. Blocks for the user's answer.

    Raises:
        ConfigError: no terminal, and ``must_say``.
        typer.Exit: the user declined.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if must_say:
            raise ConfigError(f"This would {what} and needs a confirmation: give --yes, or --dry-run to look.")
        return
    if not typer.confirm(printable(f"{what[0].upper()}{what[1:]}?"), err=True):
        say("nothing was changed", err=True)
        raise typer.Exit(1)


def goes_on(what: str, record: Any, *, yes: bool, dry_run: bool, as_json: bool) -> bool:
    """Return whether to do ``what``, see ``agree``; with ``dry_run`` print it and return False.

    Args:
        record: what would be done, as JSON.
    """
    if dry_run:
        told(f"would {what}", record, as_json)
        return False
    agree(what, yes=yes)
    return True


def told(text: str, record: Any, as_json: bool) -> None:
    """Print a result in words, or as a JSON record."""
    print_json(record) if as_json else say(text)


def many(count: int, noun: str) -> str:
    """Format a count: ``1 job``, ``3 jobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def operator() -> str:
    """Return the name of the current user, recorded as the author of manual changes."""
    try:
        return f"operator {getpass.getuser()}"
    except (KeyError, OSError):  # a container without an entry of its user
        return f"operator with uid {os.getuid()}"
