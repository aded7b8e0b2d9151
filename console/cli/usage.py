"""Describe mistakes in a command line in one sentence each.

Some releases of typer bundle click and others use the installed one; the errors of both are recognised by the base
class of typer's own ``BadParameter``.
"""

import difflib
import inspect
import re
from pathlib import Path
from typing import Any, Final

import typer

from penstock.console.cli.command import ConfigOption, LogFormatOption, RedisOption, add_kind
from penstock.errors import ConfigError

#: Base class of click's errors for user mistakes.
UsageMistake: Final[type[Exception]] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)


def sentence(mistake: Exception) -> str:
    """Return what is wrong with the command line and how to fix it; ``mistake`` is a ``UsageMistake``."""
    # Imported only for a mistake: both are slow to import.
    from pydantic_core import ValidationError

    from penstock.config.reading.validation_errors import explain

    context: Any = getattr(mistake, "ctx", None)
    path = _path(context) if context is not None else "penstock"
    # Newer releases of typer check values with pydantic.
    if isinstance(mistake, typer.BadParameter) and isinstance(mistake.__cause__, ValidationError):
        mistake.message = explain(mistake.__cause__.errors()[0])
    said = " ".join(mistake.format_message().split())  # type: ignore[attr-defined]
    if said == "Missing command.":
        names = context.command.list_commands(context)
        return f"Give a command: {_or(names)}; `{path} --help` describes them."
    said, _, near = said.partition(" Did you mean ")
    said = said.rstrip(".")
    if not near:
        near = said.partition("(Possible ")[2].partition(": ")[2].rstrip(")")
        said = said.partition(" (Possible ")[0]
    if near:
        return f"{said}: did you mean {_or(re.findall(r'[^ ,?]+', near.replace(' or ', ' ')))}?"
    return f"{said}; `{path} --help` says what there is."


class Source:
    """The configuration that the options of a command name: its file, and overrides of its keys."""

    def __init__(self, context: typer.Context, config: Path, **_: Any) -> None:
        self.path, self.overrides = config, overrides_of(context)


add_kind(
    Source,
    {
        "context": (typer.Context, inspect.Parameter.empty),
        "config": (ConfigOption, inspect.Parameter.empty),
        "redis": (RedisOption, None),
        "log_format": (LogFormatOption, None),
    },
    Source,
)


def overrides_of(context: typer.Context) -> list[str]:
    """Return arguments that are not options of the command: configuration overrides ``--a.b=c``, ``--redis`` and
    ``--log-format``.

    Raises:
        ConfigError: an argument is not an override; names the option that was meant, or the correct form.
    """
    names = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    keys = {"redis.url": context.params.get("redis"), "logs.format": context.params.get("log_format")}
    given = [*context.args, *(f"--{key}={value}" for key, value in keys.items() if value is not None)]
    for index, argument in enumerate(given):
        name, equals, _ = argument.partition("=")
        near = next(iter(difflib.get_close_matches(name, [*names, "--help"], n=1, cutoff=0.7)), None)
        if near and "." not in name:
            raise ConfigError(f"There is no option {name}: did you mean {near}?")
        if equals:
            continue
        value = given[index + 1] if index + 1 < len(given) and not given[index + 1].startswith("-") else "VALUE"
        if not name.startswith("--"):
            raise ConfigError(
                f"The argument {argument!r} is one too many: `{_path(context)} --help` says what there is; keys "
                "of the configuration are set as --a.b=c."
            )
        raise ConfigError(f"{name} has no value: write {name}={value}.")
    return given


def _path(context: Any) -> str:
    """Return ``penstock VERB``; a default command has no name of its own."""
    return " ".join(context.command_path.split())


def _or(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
