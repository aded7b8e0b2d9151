"""``penstock buffer ls``: list ready groups, and why each is not cut. ``penstock buffer --config`` runs the buffer."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.console.cli.confirm import OVERRIDES, ConfigOption, LogFormatOption, RedisOption
from penstock.console.cli.lists import Choice, Row, list_of_run, show
from penstock.console.cli.target import Target

#: Default command of ``penstock buffer``.
SERVE = "serve"


class _ServesByDefault(TyperGroup):
    """Run ``penstock buffer --config FILE --a.b=c`` as ``penstock buffer serve --config FILE --a.b=c``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [SERVE, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == SERVE else name, command, rest


buffer_app = typer.Typer(help="Cut finished groups into batches for the trainers; `ls`: groups.", cls=_ServesByDefault)

_COLUMNS: Sequence[str] = (
    *("job", "subscription", "lane", "oldest", "newest", "staleness", "bound", "samples", "reward_mean", "age_s"),
    *("state", "why"),
)


@buffer_app.command(SERVE, context_settings=OVERRIDES, hidden=True)
def serve(
    context: typer.Context, config: ConfigOption, redis: RedisOption = None, log_format: LogFormatOption = None
) -> None:
    """Cut finished groups into batches for the trainers. `penstock buffer ls` lists the groups that are ready."""
    from penstock.console.cli.part import run_part
    from penstock.console.cli.usage import overrides_of

    run_part("buffer", "buffer", config, overrides_of(context))


@buffer_app.command("ls")
@list_of_run
def buffer_ls(target: Target, choice: Choice) -> None:
    """List ready groups, per subscription of their lane: versions, staleness, age, and why they are not cut."""
    from penstock.console.read.groups import FIELDS, list_groups

    rows = list_groups(target.client, target.keys)
    show(rows, FIELDS, _COLUMNS, "ready groups", choice, _in_words)


def _in_words(row: Row) -> dict[str, Any]:
    samples = row["samples"] if row["samples"] == row["wanted"] else f"{row['samples']} of {row['wanted']}"
    return {**row, "samples": samples}
