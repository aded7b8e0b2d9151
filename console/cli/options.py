"""Options that commands share."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.console.cli import completion
from penstock.logs import LogFormat

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
