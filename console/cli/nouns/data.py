"""``penstock data``: show success rates of prompts in datasets with a curriculum."""

from typing import Annotated, Any

import typer

from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from penstock.console.cli.lists import Choice, Row, list_of_run, show
from penstock.console.cli.target import Target
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError

data_app = typer.Typer(help="Datasets with a curriculum, and the success rates of their prompts.")


@data_app.command("ls")
@list_of_run
def data_ls(target: Target, choice: Choice) -> None:
    """List datasets: prompts generated for, the share of right answers, always and never right ones, and skips."""
    from penstock.console.read.rates import FIELDS, list_datasets

    rows = list_datasets(target.client, target.keys)
    show(rows, FIELDS, FIELDS, "datasets with a curriculum", choice, _in_words)


@data_app.command("show")
def data_show(
    prompt: Annotated[str, typer.Argument(help="DATASET/LINE, as `penstock trace` has it.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one prompt: the share of right answers in its latest groups, and its state in the curriculum."""
    from penstock.console.read.rates import prompt_of, show_prompt

    dataset, index = prompt_of(prompt)
    target = Target(run, redis, directory)
    found = show_prompt(target.client, target.keys, dataset, index)
    if found is None:
        raise ConfigError(
            f"Nothing was counted of prompt {prompt}: its dataset has no curriculum, or no group of it is complete; "
            "`penstock data ls` lists the datasets."
        )
    if as_json:
        print_json(found)
        return
    say(f"prompt {prompt}: {found['state']}, {found['mean']:.3f} of its answers right")
    say("its groups, the latest first: " + ", ".join(f"{share:.3f}" for share in found["shares"]))


def _in_words(row: Row) -> dict[str, Any]:
    mean = row["mean"]
    return {**row, "mean": None if mean is None else f"{mean:.3f}"}
