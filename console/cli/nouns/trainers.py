"""``penstock trainers``: list trainer ranks, their places, and what they wait for."""

import typer

from penstock.console.cli.lists import Choice, list_of_run, show
from penstock.console.cli.target import Target

trainers_app = typer.Typer(help="Trainers.")


@trainers_app.command("ls")
@list_of_run
def trainers_ls(target: Target, choice: Choice) -> None:
    """List ranks of trainers: whether they run, step and version, batches committed and kept, figures, waits."""
    from penstock.console.read.trainers import FIELDS, list_trainers

    rows = list_trainers(target.client, target.keys)
    show(rows, FIELDS, FIELDS, "trainers", choice)
