"""``penstock samples`` and ``penstock eval``: answers of the policy, their rewards, and what became of them."""

from typing import Annotated, Any

import typer

from penstock.console.cli.command import Answer, command, many
from penstock.console.cli.history import DatasetOption, Run, Wanted
from penstock.console.cli.nouns import show_list, show_table
from penstock.console.details import detail_lines
from penstock.console.resources import CATEGORIES, EVALS, SAMPLES
from penstock.console.selection import Choice
from penstock.console.terminal import excerpt, print_json, say, table
from penstock.errors import ConfigError
from penstock.history.eval_rows import FILE, read_rows

samples_app = typer.Typer(help=SAMPLES.noun)

#: Rows shown by default.
SHOWN = 20
SORTS = ("recorded", "reward", "version", "length")

SortOption = Annotated[
    str, typer.Option("--sort", metavar="FIELD", help=f"By {', '.join(SORTS)}; -FIELD: the greatest first.")
]


@command(samples_app, "ls", epilog=f"\b\n{SAMPLES.meanings()}")
def samples_ls(
    found: Run,
    wanted: Wanted,
    answer: Answer,
    sort: SortOption = "-recorded",
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Most rows shown.")] = SHOWN,
    after: Annotated[str, typer.Option("--after", metavar="PLACE", help="Continue after the end of a list.")] = "",
    count: Annotated[bool, typer.Option("--count", help="Print the number of samples only.")] = False,
) -> None:
    """List samples with prompt, answer, reward, version and fate; latest first."""
    from penstock.console.read.samples import listed
    from penstock.history.filters import Sort

    filters = wanted.filters()
    if best or worst:
        if best and worst:
            raise ConfigError("--best shows the highest rewards first and --worst the lowest: give one of them.")
        sort = "-reward" if best else "reward"
    if sort.removeprefix("-") not in SORTS:
        raise ConfigError(f"invalid --sort {sort!r}: choose from {', '.join(SORTS)}, or -FIELD for the greatest first.")
    if count:
        number = found.samples.count(filters)
        answer.tell(many(number, "sample"), number)
        found.tell_problems()
        return
    ascending = not sort.startswith("-")
    page = found.samples.rows(filters, Sort(sort.removeprefix("-")), limit, after, ascending=ascending)
    if answer.as_json:
        print_json([listed(row) for row in page.rows])
    else:
        show_table(SAMPLES, [listed(row) for row in page.rows])
    if page.next:
        say(f"more: --sort={sort} --after={page.next}", err=True)
    found.tell_problems()


@command(samples_app, "show")
def samples_show(
    sample: Annotated[str, typer.Argument(help="Its id, DATASET/EPOCH/LINE/K.")],
    found: Run,
    answer: Answer,
    tokens: Annotated[bool, typer.Option(help="With a line per generated token.")] = True,
) -> None:
    """Show a sample: texts, reward and its entries, times, batches, and tokens with logprob, version and loss mask."""
    from penstock.console.read.samples import shown, token_rows, turn_rows
    from penstock.history.row import ARRAYS, key_of

    key_of(sample)
    row = found.samples.row(sample)
    if row is None:
        found = found.with_rest()
        row = found.samples.row(sample)
    if row is None:
        found.tell_problems()
        raise ConfigError(
            f"Run {found.folder.name} has no sample {sample!r}; `penstock samples ls` lists those that it has."
        )
    complete = shown(row, found.samples.uses(sample)) | {"turns": turn_rows(found.folder, row)}
    if answer.as_json:
        print_json(complete)
    else:
        # An answer of one turn is its text.
        hidden = {*ARRAYS, "turns" if len(complete["turns"]) < 2 else "answer"}
        say("\n".join(detail_lines({name: one for name, one in complete.items() if name not in hidden}, SAMPLES)))
        if tokens:
            table(
                token_rows(found.folder, row), ("at", "token", "text", "logprob", "version", "loss"), "generated tokens"
            )
    found.tell_problems()


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
    from penstock.console.read.rates import prompt_of

    dataset, line = prompt_of(prompt)
    rows = answers_to(found.samples, dataset, line)
    if not rows:
        found.tell_problems()
        raise ConfigError(
            f"Run {found.folder.name} has no answer to line {line} of an evaluation on {dataset!r}; "
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
