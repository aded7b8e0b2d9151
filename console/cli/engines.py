"""``penstock engines``: release and restore GPU memory, and compare the weights that engines serve."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import Answer, Change, command, operator
from penstock.console.cli.target import LiveTarget, Target
from penstock.console.terminal import print_json, say, table
from penstock.errors import EngineError

if TYPE_CHECKING:
    from penstock.records.causes import Cause

engines_app = typer.Typer(help="Engines: their GPU memory and their weights.")

TagsOption = Annotated[str, typer.Option("--tags", help="Any of weights, cuda_graph, kv_cache, separated by commas.")]
ModelOption = Annotated[str, typer.Option("--model", help="Name of the weights.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest wait for the workers, seconds.")]

ALL = "weights,cuda_graph,kv_cache"
#: A shorter wait is not shown.
MOMENT_S = 1.0
#: Longest reason shown.
_REASON_CHARS = 200


@command(engines_app)
def offload(
    target: LiveTarget,
    change: Change,
    tags: TagsOption = ALL,
    model: ModelOption = "policy",
    timeout: TimeoutOption = 120.0,
) -> None:
    """Release GPU memory of every engine, and wait until all have. Restarted workers do so too."""
    from penstock.protocol.memory_control import check_tags

    given = set(tags.split(","))
    what = f"release {', '.join(check_tags(given))} of every engine of model {model}, and stop generating meanwhile"
    if change.agreed(what, {"would_offload": check_tags(given)}):
        _change(target, model, lambda offloaded: offloaded | given, timeout, change)


@command(engines_app)
def onload(
    target: LiveTarget,
    change: Change,
    tags: TagsOption = ALL,
    model: ModelOption = "policy",
    timeout: TimeoutOption = 120.0,
) -> None:
    """Restore GPU memory of engines; weights are loaded again before they resume."""
    from penstock.protocol.memory_control import check_tags

    given = set(tags.split(","))
    what = f"restore {', '.join(check_tags(given))} of every engine of model {model}"
    if change.agreed(what, {"would_onload": check_tags(given)}, ask=False):
        _change(target, model, lambda offloaded: offloaded - given, timeout, change)


def _change(
    target: Target, model: str, change_tags: Callable[[set[str]], set[str]], timeout: float, answer: Answer
) -> None:
    from penstock.protocol.memory_control import change
    from penstock.redis.control import Control

    with contextlib.closing(Control(target.url)) as control:
        left = change(
            control, target.keys, model, change_tags, by=operator(), timeout_s=timeout, blocked_on=_Reporter()
        )
    answer.tell(f"offloaded: {', '.join(left) or 'nothing'}", {"offloaded": left})


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
    from penstock.protocol.snapshot import snapshot

    rows: list[dict[str, Any]] = []
    for worker in snapshot(target.client, target.keys)["workers"]:
        for at in worker.engine_urls:
            if at.startswith(("http://", "https://")):
                rows.append({"worker": worker.name, "url": at, "version": worker.version, **_ask(at)})
    if answer.as_json:
        print_json(rows)
    else:
        shown = [row | {"checksum of its weights": row["checksum"] or row["why"]} for row in rows]
        table(shown, ["worker", "url", "version", "checksum of its weights"], "engines")
    _judge(rows)


def _judge(rows: list[dict[str, Any]]) -> None:
    """Raise EngineError unless all engines of a version returned the same checksum."""
    if not rows:
        raise EngineError("There is no engine whose weights could be compared; `penstock workers ls` lists workers.")
    for version in sorted({row["version"] for row in rows}):
        found = {row["checksum"] for row in rows if row["version"] == version and row["checksum"]}
        if len(found) > 1:
            raise EngineError(f"Engines with version {version} serve different weights: restart their workers.")
    if silent := [row for row in rows if not row["checksum"]]:
        first = silent[0]
        raise EngineError(
            f"{len(silent)} of {len(rows)} engines gave no checksum, so not all were compared; "
            f"{first['url']}: {first['why']}."
        )


def _ask(url: str) -> dict[str, str]:
    """Return an engine's checksum, or why it has none (as on a CPU)."""
    from penstock.protocol.engine_http import ask

    where = f"{url}/weights_checker"
    try:
        answer = ask(where, b'{"action": "checksum"}')
        if not answer.ok:
            return {"checksum": "", "why": f"it refused: {_reason(answer.body) or answer.reason or answer.status}"}
        said = json.loads(answer.body)
    except EngineError as exc:
        return {"checksum": "", "why": str(exc).replace(where, "it", 1).rstrip(".")}
    except (ValueError, RecursionError) as exc:
        return {"checksum": "", "why": f"it answers with something that is not JSON: {exc}"}
    checksum = said.get("per_engine_checksum") if isinstance(said, dict) else None
    if isinstance(checksum, str) and checksum:
        return {"checksum": checksum, "why": ""}
    return {"checksum": "", "why": f"it gave none: {_reason(json.dumps(said).encode()) or 'no reason'}"}


def _reason(body: bytes) -> str:
    """Return the message in a response's JSON, or else its last line, as one short line."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        for name in ("message", "error", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        text = value if isinstance(value, str) else json.dumps(value)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARS].rstrip(".") if lines else ""
