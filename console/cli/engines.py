"""``penstock engines``: release and restore GPU memory, and compare the weights that engines serve."""

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import Answer, Change, command, operator
from penstock.console.cli.nouns import show_table
from penstock.console.cli.target import LiveTarget, Target
from penstock.console.resources import CHECKSUMS
from penstock.console.terminal import print_json, say
from penstock.errors import EngineError

if TYPE_CHECKING:
    from penstock.protocol.presence import WorkerPresence
    from penstock.records.cause import Cause

engines_app = typer.Typer(help="Engines: their GPU memory and their weights.")

TagsOption = Annotated[str, typer.Option("--tags", help="Any of weights, cuda_graph, kv_cache, separated by commas.")]
ModelOption = Annotated[str, typer.Option("--model", help="Name of the weights.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest wait for the workers, seconds.")]

ALL = "weights,cuda_graph,kv_cache"
#: A shorter wait is not shown.
MOMENT_S = 1.0


def _add_change(verb: str, about: str, *, restores: bool) -> None:
    @command(engines_app, verb, help=about)
    def change_memory(
        target: LiveTarget,
        change: Change,
        tags: TagsOption = ALL,
        model: ModelOption = "policy",
        timeout: TimeoutOption = 120.0,
    ) -> None:
        _change(target, change, tags, model, timeout, restores=restores)


_add_change(
    "offload",
    "Release GPU memory of every engine, and wait until all have. Restarted workers do so too.",
    restores=False,
)
_add_change("onload", "Restore GPU memory of engines; weights are loaded again before they resume.", restores=True)


def _change(target: Target, change: Change, tags: str, model: str, timeout_s: float, *, restores: bool) -> None:
    from penstock.protocol import memory_control
    from penstock.redis.control import Control

    given = set(tags.split(","))
    named = memory_control.check_tags(given)
    verb, end = ("restore", "") if restores else ("release", ", and stop generating meanwhile")
    what = f"{verb} {', '.join(named)} of every engine of model {model}{end}"
    if not change.agreed(what, {"would_onload" if restores else "would_offload": named}, ask=not restores):
        return
    with contextlib.closing(Control(target.url)) as control:
        left = memory_control.change(
            control,
            target.keys,
            model,
            lambda offloaded: offloaded - given if restores else offloaded | given,
            by=operator(),
            timeout_s=timeout_s,
            blocked_on=_Reporter(),
        )
    change.tell(f"offloaded: {', '.join(left) or 'nothing'}", {"offloaded": left})


class _Reporter:
    """Reports the cause of a wait on stderr, once it has lasted longer than a moment, and when it changes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._reported: Cause | None = None

    def __call__(self, cause: "Cause | None") -> None:
        if cause is not None and cause != self._reported and time.monotonic() - self._began > MOMENT_S:
            self._reported = cause
            say(f"waiting for {cause}", err=True)


@command(engines_app)
def check(target: Target, answer: Answer) -> None:
    """Compare the checksums of all engines' weights: those of one version must be equal (exit code 1 if not)."""
    from penstock.protocol.presence import live_workers

    workers = live_workers(target.client, target.keys)
    rows = [_checksum(one, url) for one in workers for url in one.engine_urls if url.startswith("http")]
    print_json(rows) if answer.as_json else show_table(CHECKSUMS, rows)
    _judge(rows)


def _checksum(worker: "WorkerPresence", url: str) -> dict[str, Any]:
    """Return an engine's checksum, or why it has none (as on a CPU)."""
    from penstock.protocol.engine_http import check_one

    row = {"worker": worker.name, "url": url, "version": worker.version, "checksum": "", "why": ""}
    try:
        found = check_one(worker, url, "checksum").get("per_engine_checksum")
    except EngineError as exc:
        return row | {"why": str(exc)}
    return row | ({"checksum": found} if found and isinstance(found, str) else {"why": "It gave none."})


def _judge(rows: list[dict[str, Any]]) -> None:
    """Raise EngineError unless all engines of a version returned the same checksum."""
    if not rows:
        raise EngineError("There is no engine whose weights could be compared; `penstock workers ls` lists workers.")
    for version in sorted({row["version"] for row in rows}):
        found = {row["checksum"] for row in rows if row["version"] == version and row["checksum"]}
        if len(found) > 1:
            raise EngineError(f"Engines with version {version} serve different weights: restart their workers.")
    if silent := [row for row in rows if not row["checksum"]]:
        raise EngineError(
            f"{len(silent)} of {len(rows)} engines gave no checksum, so not all were compared. {silent[0]['why']}"
        )
