"""``penstock trainers``: the ranks that train, where they are, and what they wait for."""

import typer

from console.cli.lists import Choice, LimitOption, SortOption, WhereOption, show
from console.cli.options import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from console.cli.target import Target

trainers_app = typer.Typer(help="Trainers.")


@trainers_app.command("ls")
def trainers_ls(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    where: WhereOption = None,
    sort: SortOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ranks of trainers: whether they are there, their step and version, batches committed and kept, figures, waits."""
    from console.read.trainers import FIELDS, list_trainers

    target = Target(run, redis, directory)
    rows = list_trainers(target.client, target.keys)
    show(rows, FIELDS, FIELDS, "trainers", Choice(where or (), sort, limit, as_json))
