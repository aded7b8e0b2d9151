"""``penstock fleet``: plan a fleet of engines, run it, look at it, grow and shrink it."""

from typing import Annotated, Any

import orjson
import typer

from penstock.cli import OVERRIDES, ConfigOption

fleet_app = typer.Typer(help="Engines in groups: plan, run, scale.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print(value: Any) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


@fleet_app.command(context_settings=OVERRIDES)
def plan(context: typer.Context, config: ConfigOption, as_json: JsonOption = False) -> None:
    """Print every process of the fleet: where, on which GPUs and ports, by which command. Starts nothing."""
    from penstock.cli import check_ours
    from penstock.load_config import load_config

    loaded = load_config(config, context.args)
    check_ours("workers")
    from workers.fleet.nodes import local_nodes
    from workers.fleet.plan import plan as lay_out
    from workers.fleet.show import as_records, as_text

    laid_out = lay_out(loaded, local_nodes(loaded))
    if as_json:
        _print(as_records(laid_out))
    else:
        typer.echo(as_text(laid_out))
