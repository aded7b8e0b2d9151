"""``penstock metrics``: list the addresses of the Prometheus metrics of a run's parts."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from penstock.console.cli.command import command
from penstock.console.cli.target import Target
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError

metrics_app = typer.Typer(help="Prometheus metrics: where the parts of a run have theirs.")


@metrics_app.callback()
def _root() -> None:
    """Prometheus metrics: where the parts of a run have theirs."""


def _checked(out: Path | None) -> Path | None:
    if out is not None and out.suffix not in (".json", ".yml", ".yaml"):
        raise ConfigError(f"--out {str(out)!r}: Prometheus reads files that end in .json, .yml or .yaml; name it so.")
    return out


@command(metrics_app, "discovery")
def discovery(
    target: Target,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the list to FILE instead of printing it.", callback=_checked),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.5, metavar="SECONDS", help="Keep the file current until SIGTERM or Ctrl-C."),
    ] = None,
) -> None:
    """Print the parts that serve metrics, in the format of Prometheus' file-based discovery (``file_sd_configs``)."""
    from penstock.metrics.server import targets

    if every is not None and out is None:
        raise ConfigError("--every keeps a file current: name it with --out FILE.")
    if out is None:
        print_json(targets(target.client, target.keys))
    elif every is None:
        _write(target, out)
    else:
        _keep(target, out, every)


def _write(target: Target, out: Path) -> None:
    from penstock.metrics.server import targets, write_targets

    groups = targets(target.client, target.keys)
    if write_targets(out, groups):
        say(f"{out}: {len(groups)} parts of run {target.keys.run} serve metrics")


def _keep(target: Target, out: Path, every_s: float) -> None:
    """Rewrite the file when it changes, until a signal; if Redis does not answer, report that and keep the file."""
    import redis as redis_

    from penstock.redis.connect import translate

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.is_set():
        try:
            _write(target, out)
        except redis_.RedisError as exc:
            say(str(translate(exc, target.url)), err=True)
        ended.wait(every_s)
