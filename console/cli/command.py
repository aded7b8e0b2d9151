"""Make commands from functions: a parameter of one of these types brings its options along.

| type | options |
|---|---|
| ``Target`` | ``--run`` (``RUN`` if the command has no argument), ``--redis``, ``--directory``, ``--config`` |
| ``LiveTarget`` | the same, for commands that change the run: it must not be over |
| ``RunOptions`` | the same, for commands that connect to the run themselves |
| ``Choice`` | ``--where``, ``--sort``, ``--limit``, ``--after``, ``--json`` |
| ``Answer`` | ``--json`` |
| ``Change`` | ``--yes``, ``--dry-run``, ``--json`` |

Irreversible changes ask for confirmation on a terminal; ``--yes`` confirms, ``--dry-run`` only reports. Without a
terminal, commands that scripts have always called proceed; ``must_say`` ones fail with exit code 2. None waits.
"""

import getpass
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from penstock.console.cli.target import DIRECTORY, LiveTarget, Target, run_folders
from penstock.console.selection import Choice
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError
from penstock.system.logs import LogFormat
from penstock.text import printable


def complete_runs(context: typer.Context, begun: str) -> list[str]:
    """Return the runs under --directory that begin so, newest first."""
    folders = run_folders(Path(context.params.get("directory") or DIRECTORY), "run.json", "redis.json")
    return [path.name for path in folders if path.name.startswith(begun) and path.name.isprintable()]


#: Unknown options of a command are configuration overrides.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
UrlOption = Annotated[
    str | None, typer.Option("--redis", "--redis.url", help="Redis URL; default: what the run's folder says.")
]
FolderOption = Annotated[Path, typer.Option("--directory", help="Folder of the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunOption = Annotated[
    str | None,
    typer.Option("--run", help="Name of the run; default: the newest in --directory.", autocompletion=complete_runs),
]
ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="YAML file of the run.")]
#: Set logs.format and redis.url, by ``overrides_of``.
LogFormatOption = Annotated[
    LogFormat | None, typer.Option("--log-format", help="How the log is written; default: what the file says.")
]
RedisOption = Annotated[
    str | None, typer.Option("--redis", "--redis.url", metavar="URL", help="Redis URL; default: what the file says.")
]
_WHERE = "Only rows of which this is true; =, !=, <, <=, >, >= and ~ (contains). Several: all of them."
WhereOption = Annotated[list[str] | None, typer.Option("--where", metavar="FIELD=VALUE", help=_WHERE)]
_NamedArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Name of the run.", autocompletion=complete_runs)
]


def _option(kind: Any, default: Any, *names: str, about: str, **how: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=about, **how)], default


Options = Mapping[str, tuple[Any, Any]]
_JSON: Options = {"as_json": (JsonOption, False)}
_TARGET: Options = {
    "run": (RunOption, None),
    "redis": (UrlOption, None),
    "directory": (FolderOption, DIRECTORY),
    "config": _option(Path | None, None, "--config", "-c", metavar="FILE", about="YAML file of the run."),
}
_CHANGE: Options = {
    "yes": _option(bool, False, "--yes", "-y", about="Do not ask."),
    "dry_run": _option(bool, False, "--dry-run", about="Show what would be done, without changing anything."),
    **_JSON,
}
_CHOICE: Options = {
    "where": (WhereOption, None),
    "sort": _option(str | None, None, metavar="FIELD", about="Sort by it; -FIELD: the other way round."),
    "limit": _option(int | None, None, min=1, about="Most rows shown; default: 50, and all with --json."),
    "after": _option(int, 0, min=0, metavar="N", about="Skip N rows, as a truncated list suggests."),
    **_JSON,
}


class RunOptions(NamedTuple):
    """How a run is named, for commands that also answer if its Redis does not."""

    run: str | None = None
    redis: str | None = None
    directory: Path = DIRECTORY
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """How a result is printed."""

    as_json: bool = False

    def tell(self, text: str, record: Any) -> None:
        """Print a result in words, or as a JSON record."""
        print_json(record) if self.as_json else say(text)


@dataclass(frozen=True, slots=True)
class Change(Answer):
    """How a change is confirmed."""

    yes: bool = False
    dry_run: bool = False

    def agreed(self, what: str, record: Any, *, ask: bool = True) -> bool:
        """Return whether to do ``what`` (``cancel 3 jobs``), see ``agree``; with --dry-run print it and return False.

        Args:
            record: what would be done, as JSON.
        """
        if self.dry_run:
            self.tell(f"would {what}", record)
            return False
        agree(what, yes=self.yes or not ask)
        return True


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
            raise ConfigError(f"This would {what}: pass --yes to confirm, or --dry-run to preview.")
        return
    if not typer.confirm(printable(f"{what[0].upper()}{what[1:]}?"), err=True):
        say("nothing was changed", err=True)
        raise typer.Exit(1)


def many(count: int, noun: str) -> str:
    """Format a count: ``1 job``, ``3 jobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def operator() -> str:
    """Return the name of the current user, recorded as the author of manual changes."""
    try:
        return f"operator {getpass.getuser()}"
    except (KeyError, OSError):  # a container without an entry of its user
        return f"operator with uid {os.getuid()}"


#: Type of a parameter -> its options, and the function that makes its value of theirs.
_KINDS: dict[type, tuple[Options, Callable[..., Any]]] = {
    Target: (_TARGET, Target.named),
    LiveTarget: (_TARGET, LiveTarget.named),
    RunOptions: (_TARGET, RunOptions),
    Answer: (_JSON, Answer),
    Change: (_CHANGE, Change),
    Choice: (_CHOICE, lambda where, **given: Choice(where or (), **given)),
}


def add_kind(kind: type, options: Options, make: Callable[..., Any], *, of_run: bool = False) -> None:
    """Let parameters of type ``kind`` bring these options; with ``of_run`` also those of a ``Target``."""
    _KINDS[kind] = ({**(_TARGET if of_run else {}), **options}, make)


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds a function to ``app`` as a command; see the module's docstring."""

    def add(verb: Callable[..., None]) -> Callable[..., None]:
        app.command(name, **settings)(_with_options(verb))
        return verb

    return add


def _with_options(verb: Callable[..., None]) -> Callable[..., None]:
    own = inspect.signature(verb, eval_str=True).parameters
    kinds = {name: _KINDS[one.annotation] for name, one in own.items() if one.annotation in _KINDS}
    shown = [one for name, one in own.items() if name not in kinds]
    brought = {option: pair for options, _ in kinds.values() for option, pair in options.items()}
    if "run" in brought and not any(_is_argument(one) for one in shown):
        brought["named"] = (_NamedArgument, None)

    def run(**given: Any) -> None:
        if (named := given.pop("named", None)) is not None:
            if given["run"] not in (None, named):
                raise ConfigError(f"The run is named twice: {named} and --run {given['run']}; give one of them.")
            given["run"] = named
        values = {
            name: make(**{option: given[option] for option in options}) for name, (options, make) in kinds.items()
        }
        verb(**{one.name: given[one.name] for one in shown}, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in shown]
    parameters += [inspect.Parameter(name, keyword, default=default, annotation=annotation)
                   for name, (annotation, default) in brought.items()]  # fmt: skip
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__, run.__name__ = verb.__doc__, verb.__name__
    return run


def _is_argument(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(one, typer.models.ArgumentInfo) for one in metadata)
