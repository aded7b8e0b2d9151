"""``penstock eval``: show answers to held-out prompts, version by version."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from penstock.console.cli.history.filters import DatasetOption, open_run
from penstock.console.cli.history.samples import excerpt
from penstock.console.cli.lists import AfterOption, Choice, LimitOption, SortOption, WhereOption, show
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError
from penstock.history.eval_rows import FILE, read_rows

eval_app = typer.Typer(help="Evaluation: scores and answers of held-out prompts over versions.")


@eval_app.command("ls")
def eval_ls(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    where: WhereOption = None,
    sort: SortOption = None,
    limit: LimitOption = None,
    after: AfterOption = 0,
    as_json: JsonOption = False,
    dataset: DatasetOption = "",
    categories: Annotated[
        bool, typer.Option("--categories", help="By category of the prompts, with votes; takes longer.")
    ] = False,
) -> None:
    """List datasets and versions with prompts, answers, rewards, and chances that one of several is right."""
    from penstock.console.read.evals import CATEGORY_FIELDS, FIELDS, list_categories, list_evals

    found = open_run(run, redis, directory)
    rows, fields = list_evals(found.samples, dataset, read_rows(found.folder / FILE)), FIELDS
    if categories:
        rows, fields = list_categories(found.samples, dataset), CATEGORY_FIELDS
    show(rows, fields, fields, "evaluation", Choice(where or (), sort, limit, as_json, after), _rates_in_words)
    found.tell_problems()


def _rates_in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    rates = {name: row[name] for name in ("pass_at", "majority_at") if name in row}
    return {**row, **{name: ", ".join(f"{k}: {rate:.3g}" for k, rate in of.items()) for name, of in rates.items()}}


@eval_app.command("show")
def eval_show(
    prompt: Annotated[str, typer.Argument(metavar="DATASET/LINE", help="A prompt: its dataset, and its line there.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one held-out prompt, and how each version answered it."""
    from penstock.console.read.evals import answers_to

    name, slash, line = prompt.rpartition("/")
    if not slash or not (line.isascii() and line.isdecimal() and len(line) < 19):
        raise ConfigError(f"{prompt!r} names no prompt: write DATASET/LINE, as in heldout/3.")
    found = open_run(run, redis, directory)
    rows = answers_to(found.samples, name, int(line))
    if not rows:
        found.tell_problems()
        raise ConfigError(
            f"Run {found.folder.name} has no answer to line {int(line)} of an evaluation on {name!r}; "
            "`penstock eval ls` lists what was evaluated."
        )
    if as_json:
        print_json(rows)
    else:
        _show(rows)
    found.tell_problems()


def _show(rows: list[dict[str, Any]]) -> None:
    say(rows[-1]["prompt"] or "(its prompt is not kept)")
    if rows[-1]["label"]:
        say(f"label: {rows[-1]['label']}")
    shown = [{**row, "answer": excerpt(row["answer"])} for row in rows]
    table(shown, ["version", "reward", "num_generated", "status", "id", "answer"], "answers")
