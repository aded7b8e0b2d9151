"""``penstock doctor``: find problems that could hurt a run, and say what to do."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.console.cli.command import Answer, RunOptions, command, many
from penstock.console.cli.target import RunIsOver, Target, newest_run
from penstock.console.terminal import print_json, say
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.metrics.probes import Finding


#: Checks of a start that concern this machine, and not what is on it.
_OF_MACHINE = frozenset(("packages", "jail", "device", "engine's interpreter", "engine", "engine.url"))


def tell(findings: "Iterable[Finding]", as_json: bool) -> int:
    """Print findings as they arrive, or as JSON; return the number of errors. Blocks until all are complete."""
    from penstock.metrics.probes import Level

    found = []
    for one in findings:
        found.append(one)
        if not as_json:
            todo = f": {one.todo}" if one.todo else ""
            say(f"{one.level:<7}  {one.what}: {one.found}{todo}")
    errors, warnings = (sum(one.level is level for one in found) for level in (Level.ERROR, Level.WARNING))
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        say(f"{many(errors, 'error')}, {many(warnings, 'warning')}", err=True)
    return errors


def findings_of(options: RunOptions) -> "Iterator[Finding]":
    """Yield the findings about a run and this machine as they arrive. Blocks for each check."""
    from penstock.config.load import load_config
    from penstock.console.cli.check import checks_of, once
    from penstock.console.read.health import checks_of_run
    from penstock.metrics.gpu_load import visible_gpus
    from penstock.metrics.probes import Finding, Level, look_at_disk, run_checks

    run, url, directory, path = options
    config = load_config(path, []) if path is not None else None
    if config is not None:
        run, url, directory = run or config.run, url or config.redis.url, config.run_dir.parent
    target = None
    try:
        run = run or newest_run(directory)
        target = Target(run, url, directory)
    except RunIsOver as exc:
        yield Finding("redis", Level.WARNING, str(exc))
    except PenstockError as exc:
        yield Finding("redis", Level.ERROR, str(exc))
    if target is not None:
        yield from run_checks(checks_of_run(target.client, target.keys, target.models()))
    folder = directory / run if run else directory
    try:
        config = config or _kept_config(folder)
    except PenstockError as exc:
        yield Finding("configuration", Level.ERROR, str(exc))
    yield look_at_disk("run's folder", folder)
    yield Finding("gpus", Level.OK, ", ".join(visible_gpus()) or "none")
    if config is None:
        todo = "give --config FILE, or --directory of the runs, to check environments and GPUs too"
        yield Finding("environments", Level.WARNING, f"there is no configuration in {folder}", todo)
    else:
        yield from once(run_checks(check for check in checks_of(config) if check[0] in _OF_MACHINE))


def _kept_config(folder: Path) -> "Config | None":
    """Return the configuration saved in the run's folder; None if there is none. Raises ConfigError."""
    from penstock.redis.saved_config import CONFIG_FILE, load_saved

    return load_saved(folder) if (folder / CONFIG_FILE).is_file() else None


def register(app: typer.Typer) -> None:
    """Add the command to ``penstock``."""

    @command(app)
    def doctor(options: RunOptions, answer: Answer) -> None:
        """Check Redis, clocks, disks, environments, GPUs, payload servers and weights; exit code 1 on an error."""
        if tell(findings_of(options), answer.as_json):
            raise typer.Exit(1)
