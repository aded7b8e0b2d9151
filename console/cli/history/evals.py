"""``penstock eval``: show answers to held-out prompts, version by version."""

from typing import Annotated, Any

import typer

from penstock.console.cli.command import Answer, command
from penstock.console.cli.history.filters import DatasetOption, Run
from penstock.console.cli.nouns import show_list
from penstock.console.resources import CATEGORIES, EVALS
from penstock.console.selection import Choice
from penstock.console.terminal import excerpt, print_json, say, table
from penstock.errors import ConfigError
from penstock.history.eval_rows import FILE, read_rows

eval_app = typer.Typer(help=EVALS.noun)


@command(eval_app, "ls", epilog=f"\b\n{EVALS.meanings()}")
def eval_ls(
    found: Run,
    choice: Choice,
    dataset: DatasetOption = "",
    categories: Annotated[
        bool, typer.Option("--categories", help="By category of the prompts, with votes; takes longer.")
    ] = False,
) -> None:
    """List datasets and versions with prompts, answers, rewards, and chances that one of several is right."""
    from penstock.console.read.evals import list_categories, list_evals

    if categories:
        show_list(CATEGORIES, list_categories(found.samples, dataset), choice)
    else:
        show_list(EVALS, list_evals(found.samples, dataset, read_rows(found.folder / FILE)), choice)
    found.tell_problems()


@command(eval_app, "show")
def eval_show(
    prompt: Annotated[str, typer.Argument(metavar="DATASET/LINE", help="A prompt: its dataset, and its line there.")],
    found: Run,
    answer: Answer,
) -> None:
    """Show one held-out prompt, and how each version answered it."""
    from penstock.console.read.evals import answers_to

    name, slash, line = prompt.rpartition("/")
    if not slash or not (line.isascii() and line.isdecimal() and len(line) < 19):
        raise ConfigError(f"{prompt!r} names no prompt: write DATASET/LINE, as in heldout/3.")
    rows = answers_to(found.samples, name, int(line))
    if not rows:
        found.tell_problems()
        raise ConfigError(
            f"Run {found.folder.name} has no answer to line {int(line)} of an evaluation on {name!r}; "
            "`penstock eval ls` lists what was evaluated."
        )
    if answer.as_json:
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
