"""``penstock engines``: give up and take back GPU memory, and compare the weights that engines serve."""

import getpass
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.errors import EngineError
from penstock.inspect_cli import FolderOption, JsonOption, Target, UrlOption

engines_app = typer.Typer(help="Engines: their GPU memory and their weights.", no_args_is_help=True)

RunOption = Annotated[str | None, typer.Option("--run", help="The run; default: the newest in the folder.")]
TagsOption = Annotated[str, typer.Option("--tags", help="Of weights, cuda_graph, kv_cache; comma-separated.")]
ModelOption = Annotated[str, typer.Option("--model", help="Name of the weights.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest wait for the workers, seconds.")]

ALL = "weights,cuda_graph,kv_cache"
#: Longest answer of an engine that is read, and longest wait for it.
_ANSWER_BYTES, _ANSWER_S = 4 * 1024 * 1024, 120.0


@engines_app.command()
def offload(
    run: RunOption = None,
    tags: TagsOption = ALL,
    model: ModelOption = "policy",
    timeout: TimeoutOption = 120.0,
    url: UrlOption = None,
    directory: FolderOption = Path("runs"),
) -> None:
    """Have every engine give up GPU memory, and wait until all have. Restarted workers obey too."""
    given = set(tags.split(","))
    _change(Target(run, url, directory), model, lambda offloaded: offloaded | given, timeout)


@engines_app.command()
def onload(
    run: RunOption = None,
    tags: TagsOption = ALL,
    model: ModelOption = "policy",
    timeout: TimeoutOption = 120.0,
    url: UrlOption = None,
    directory: FolderOption = Path("runs"),
) -> None:
    """Let engines have their memory again; weights are loaded anew before they go on."""
    given = set(tags.split(","))
    _change(Target(run, url, directory), model, lambda offloaded: offloaded - given, timeout)


def _change(target: Target, model: str, change_tags: Callable[[set[str]], set[str]], timeout: float) -> None:
    from penstock.control import Control
    from penstock.memory_control import change

    control = Control(target.url)
    try:
        left = change(control, target.keys, model, change_tags, by=f"operator {getpass.getuser()}", timeout_s=timeout)
    finally:
        control.close()
    Console().print(f"offloaded: {', '.join(left) or 'nothing'}")


@engines_app.command()
def check(
    run: RunOption = None,
    url: UrlOption = None,
    directory: FolderOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Ask every engine for the checksum of its weights: engines of one version must agree (exit code 1 if not)."""
    from penstock.messages import unpack

    target = Target(run, url, directory)
    rows: list[dict[str, Any]] = []
    for raw in target.client.hvals(target.keys.workers):
        record = unpack(raw, "presence of a worker")
        rows.append({"worker": record["name"], "version": record["version"], **_ask(str(record["url"]))})
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        table = Table("worker", "version", "checksum of its weights")
        for row in rows:
            table.add_row(row["worker"], str(row["version"]), row["checksum"] or row["why"])
        Console().print(table)
    for version in {row["version"] for row in rows}:
        found = {row["checksum"] for row in rows if row["version"] == version and row["checksum"]}
        if len(found) > 1:
            raise EngineError(f"Engines with version {version} serve different weights: restart their workers.")


def _ask(url: str) -> dict[str, str]:
    """An engine's own checksum, or why it has none (a server on CPU has none)."""
    request = urllib.request.Request(
        f"{url}/weights_checker", data=b'{"action": "checksum"}', headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as response:
            answer = json.loads(response.read(_ANSWER_BYTES))
    except urllib.error.HTTPError as exc:
        return {"checksum": "", "why": f"the engine refused: {exc.read(300).decode(errors='replace')}"}
    except (OSError, ValueError) as exc:
        return {"checksum": "", "why": f"the engine does not answer: {exc}"}
    return {"checksum": str(answer.get("per_engine_checksum", "")), "why": str(answer.get("message", ""))}
