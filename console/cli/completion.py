"""Shell completion of the names of runs; an id of a job or a worker would need the run's Redis at each press of TAB."""

from pathlib import Path

import typer


def runs(context: typer.Context, begun: str) -> list[str]:
    """Return runs under --directory, newest first."""
    from penstock.console.cli.target import run_folders

    folders = run_folders(Path(context.params.get("directory") or "runs"), "run.json", "redis.json")
    return [path.name for path in folders if path.name.startswith(begun) and path.name.isprintable()]
