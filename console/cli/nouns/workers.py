"""``penstock workers``: list workers, and show one."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from penstock.console.cli.lists import Choice, Row, list_of_run, show
from penstock.console.cli.target import Target
from penstock.console.terminal import print_json, say, say_fields, table
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.protocol.presence import WorkerPresence

weights_app = typer.Typer(help="Publications of weights.")

_VERSION_COLUMNS = [
    "id",
    "model",
    "step",
    "transport",
    "size",
    "age_s",
    "workers",
    "loading",
    "pinned_by",
    "path",
    "state",
]


@weights_app.command("ls")
@list_of_run
def weights_ls(target: Target, choice: Choice) -> None:
    """List publications, newest first: version, place, size, workers that have or load it, and what keeps it."""
    from penstock.console.read.weights import FIELDS, list_weights

    rows = list_weights(target.client, target.keys, target.models())
    show(rows, FIELDS, _VERSION_COLUMNS, "publications", choice, _in_words)


def _in_words(row: Row) -> dict[str, Any]:
    names = {field: ", ".join(row[field] or ()) for field in ("workers", "loading", "pinned_by")}
    size = row["folder"] if row["num_bytes"] is None else f"{row['num_bytes'] / 1e6:,.1f} MB"
    return {**row, **names, "size": size}


trainers_app = typer.Typer(help="Trainers.")


@trainers_app.command("ls")
@list_of_run
def trainers_ls(target: Target, choice: Choice) -> None:
    """List ranks of trainers: whether they run, step and version, batches committed and kept, figures, waits."""
    from penstock.console.read.trainers import FIELDS, list_trainers

    rows = list_trainers(target.client, target.keys)
    show(rows, FIELDS, FIELDS, "trainers", choice)


workers_app = typer.Typer(help="Workers.")

_COLUMNS = ["name", "host", "pid", "engine", "url", "version", "state", "held", "running", "slots", "tokens_per_s"]


def show_workers(workers: "list[WorkerPresence]", columns: list[str]) -> None:
    """Print workers as a table, and below it their problems."""
    rows = [asdict(worker) for worker in workers]
    table(rows, columns, "workers")
    _say_why(rows)


def _say_why(rows: "Iterable[Row]") -> None:
    # Below the table: reasons may have many lines.
    for row in rows:
        if row["why"]:
            say(f"{row['name']} ({row['state']}): {row['why']}")


@workers_app.command("ls")
@list_of_run
def workers_ls(target: Target, choice: Choice) -> None:
    """List live workers."""
    from penstock.console.read.workers import FIELDS, list_workers

    rows = [asdict(worker) for worker in list_workers(target.client, target.keys)]
    shown = show(rows, FIELDS, _COLUMNS, "workers", choice)
    if not choice.as_json:
        _say_why(shown)


@workers_app.command("show")
def workers_show(
    name: Annotated[
        str, typer.Argument(help="Its name, or the one that it was started with.", autocompletion=completion.workers)
    ],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one worker: its presence record, its engines, its leased jobs, and what it waits for."""
    from penstock.console.read.workers import read_worker

    target = Target(run, redis, directory)
    found = read_worker(target.client, target.keys, name)
    if found is None:
        raise ConfigError(f"There is no worker {name!r}; `penstock workers ls` lists those that are alive.")
    if as_json:
        print_json(found)
        return
    jobs, waits, engines, gpus = (found.pop(field) for field in ("jobs", "waits", "engines", "gpus"))
    say_fields({field: value for field, value in found.items() if value not in ("", [])})
    if engines:
        table(engines, ["url", "worker_type", "state", "version", "why"], "engines")
    if gpus:
        table(gpus, ["name", "model", "use", "used_bytes", "size_bytes"], "GPUs")
    table(jobs, ["job", "home", "lane", "committed", "n", "version", "attempts", "crashes"], "jobs")
    for wait in waits:
        say(f"{wait['who']} has waited {wait['since_s']:.0f} s for {wait['what']}")
