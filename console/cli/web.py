"""``penstock web``: a web page of the runs in a folder."""

from typing import Annotated

import typer

from penstock.console.cli.options import DIRECTORY, FolderOption
from penstock.system.extras import check_installed

#: Default port of the page.
PORT = 8420


def web(
    directory: FolderOption = DIRECTORY,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of loopback; 0: one that is free.")] = PORT,
    actions: Annotated[
        bool, typer.Option("--actions", help="Let the page requeue, purge and pause, for users with the token.")
    ] = False,
) -> None:
    """Show the runs of a folder in a browser: waits, curves, queue, workers, weights, configuration."""
    for package in ("fastapi", "uvicorn"):
        check_installed(package, "`penstock web`")
    from penstock.console.web.serve import serve

    serve(directory, port, actions=actions)


def register(app: typer.Typer) -> None:
    """Add the command to ``penstock``."""
    app.command()(web)
