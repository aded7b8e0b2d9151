"""``penstock reward try``: apply a reward to existing answers."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import OVERRIDES, FolderOption, JsonOption, UrlOption, complete_runs, many
from penstock.console.cli.history import DatasetOption, LaneOption, open_run
from penstock.console.cli.nouns import show_table
from penstock.console.cli.target import DIRECTORY
from penstock.console.cli.usage import overrides_of
from penstock.console.resources import SCORED, Row
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.console.launch.trials import Recorded

reward_app = typer.Typer(help="Rewards: apply one to existing answers.")

#: Answers that are scored by default.
MOST = 100


@reward_app.callback()
def _root() -> None:
    """Keep ``try`` a subcommand: typer needs a callback for that."""


@reward_app.command("try", context_settings=OVERRIDES)
def reward_try(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="YAML file whose reward is tried.")] = None,
    function: Annotated[
        str, typer.Option("--function", metavar="NAME", help="This reward in its place, by name or module:function.")
    ] = "",
    file: Annotated[
        Path | None, typer.Option("--file", metavar="F.jsonl", help="Lines of {prompt, response, label}.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Use the recorded answers of this run; default: the run in CONFIG.",
            autocompletion=complete_runs,
        ),
    ] = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    dataset: DatasetOption = "",
    lane: LaneOption = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Most answers, the latest first.")] = MOST,
    as_json: JsonOption = False,
) -> None:
    """Score answers of a run, or of a file, and show each one's old and new reward. Exit code 1 if all fail."""
    from penstock.console.launch.trials import rewards_of, score, summarize
    from penstock.console.progress import Steps

    overrides = overrides_of(context)
    if config is not None and config.startswith("--"):
        # Without a file the first override takes its position.
        overrides, config = [config, *overrides], None
    if file is not None and run is not None:
        raise ConfigError("--file and --run each say which answers are scored: give one of them.")
    read = _read(config, overrides, run, directory, needed=not function)
    # Search user modules here; last, as in all parts that run them.
    sys.path.append(str(Path.cwd()))
    reward, allowed = rewards_of(read, function)
    # Keep the output of rewards apart from the results.
    with redirect_stdout(sys.stderr):
        recorded = _recorded(file, run, redis, directory, read, dataset, lane, limit, own_rewards=not function)
        with Steps("scoring", len(recorded), hidden=as_json) as steps:
            rows = score(reward, allowed, recorded, steps.at)
    summary = summarize(rows)
    if as_json:
        print_json({"rows": rows, "summary": summary})
    else:
        _show(rows, summary)
    if rows and not summary["scored"]:
        raise typer.Exit(1)


def _read(path: str | None, overrides: list[str], run: str | None, directory: Path, *, needed: bool) -> "Config | None":
    """Return the named configuration, or that of the run. Raises ConfigError."""
    from penstock.config.load import load_config
    from penstock.redis.saved_config import CONFIG_FILE, load_saved

    if path is not None:
        return load_config(Path(path), overrides)
    if run is not None and (directory / run / CONFIG_FILE).is_file():
        saved = directory / run / CONFIG_FILE
        return load_config(saved, overrides) if overrides else load_saved(directory / run)
    if overrides:
        raise ConfigError(f"{overrides[0]} changes a configuration: name its file, or a run.")
    if needed:
        raise ConfigError("No reward is named: give CONFIG, or --function NAME.")
    return None


def _recorded(
    file: Path | None,
    run: str | None,
    url: str | None,
    directory: Path,
    config: "Config | None",
    dataset: str,
    lane: str,
    limit: int,
    *,
    own_rewards: bool,
) -> "list[Recorded]":
    from penstock.console.launch.trials import of_file, of_run
    from penstock.history.filters import Filters

    if file is not None:
        return list(islice(of_file(file), limit))
    if run is None and config is not None:
        run, directory = config.run, config.directory
    found = open_run(run, url, directory)
    latest = found.samples.each(Filters(dataset=dataset, lane=lane), arrays=True, ascending=False)
    recorded = list(islice(of_run(latest, config, own_rewards=own_rewards), limit))
    found.tell_problems()
    return recorded


def _show(rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    show_table(SCORED, rows)
    for name in summary["failures"]:
        say(next(row["error"] for row in rows if row["failure"] == name), err=True)
    parts = [f"{many(summary['samples'], 'answer')}, {summary['scored']} scored"]
    if summary["mean"] is not None:
        then = ""
        if summary["mean_then"] is not None:
            then = f" (then {summary['mean_then']:.4g} of {summary['had']}; {summary['differ']} differ)"
        parts.append(f"mean {summary['mean']:.4g}{then}")
    if summary["failures"]:
        parts.append("failed: " + ", ".join(f"{name} {count}" for name, count in summary["failures"].items()))
    say("; ".join(parts))
