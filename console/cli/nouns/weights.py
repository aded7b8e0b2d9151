"""``penstock weights``: list publications, where they are stored, and which parts use them."""

from typing import Any

import typer

from penstock.console.cli.lists import Choice, Row, list_of_run, show
from penstock.console.cli.target import Target

weights_app = typer.Typer(help="Publications of weights.")

_COLUMNS = ["id", "model", "step", "transport", "size", "age_s", "workers", "loading", "pinned_by", "path", "state"]


@weights_app.command("ls")
@list_of_run
def weights_ls(target: Target, choice: Choice) -> None:
    """List publications, newest first: version, place, size, workers that have or load it, and what keeps it."""
    from penstock.console.read.weights import FIELDS, list_weights

    rows = list_weights(target.client, target.keys, target.models())
    show(rows, FIELDS, _COLUMNS, "publications", choice, _in_words)


def _in_words(row: Row) -> dict[str, Any]:
    names = {field: ", ".join(row[field] or ()) for field in ("workers", "loading", "pinned_by")}
    size = row["folder"] if row["num_bytes"] is None else f"{row['num_bytes'] / 1e6:,.1f} MB"
    return {**row, **names, "size": size}
