"""``penstock payloads``: list, add, drain and abandon the payload servers of a running run."""

import contextlib
import time
from typing import Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.confirm import (
    DIRECTORY,
    DryRunOption,
    FolderOption,
    JsonOption,
    RunArgument,
    UrlOption,
    YesOption,
    goes_on,
    told,
)
from penstock.console.cli.lists import Choice, list_of_run, show
from penstock.console.cli.target import Target
from penstock.console.terminal import say
from penstock.errors import ConfigError

app = typer.Typer(help="Payload servers.")

_COLUMNS = ("name", "state", "url", "used_mb", "max_mb", "answers")

#: Seconds between two checks of a draining server.
LOOK_S = 0.5


@app.command("ls")
@list_of_run
def ls(target: Target, choice: Choice) -> None:
    """List servers with their state, memory, and whether they answer."""
    from penstock.payloads.servers import read

    there = read(target.client, target.keys)
    rows = [_row(server) for _, server in sorted(there.servers.items())]
    show(rows, _COLUMNS, _COLUMNS, "payload servers", choice)
    if not choice.as_json and not there.live:
        say("Payloads go to the control Redis.")


def _row(server: Any) -> dict[str, Any]:
    import redis as redis_

    from penstock.errors import PenstockError
    from penstock.payloads.store import open_store
    from penstock.text import redact

    row = {"name": server.name, "state": server.state, "url": redact(server.url), "answers": "yes"}
    try:
        with contextlib.closing(open_store(server.url, timeout_s=2.0)) as store:
            store.check()
            used, total = store.usage()
        return row | {"used_mb": used // 2**20, "max_mb": total // 2**20}
    except (PenstockError, redis_.RedisError) as exc:
        return row | {"answers": redact(str(exc))}


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Its name; samples record it.")],
    url: Annotated[str, typer.Argument(help="redis://[:PASSWORD@]HOST:PORT/DB, as all reach it.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Let workers write to one more server; a drained one becomes live again."""
    from penstock.config.redis import check_url
    from penstock.payloads import servers as payload_servers
    from penstock.payloads.store import open_store

    try:
        with contextlib.closing(open_store(check_url(url))) as store:
            store.check()
    except ValueError as exc:
        raise ConfigError(f"The URL {exc}.") from exc
    target = Target(run, redis, directory)
    payload_servers.add(target.client, target.keys, name, url)
    record = {"name": name, "state": payload_servers.ServerState.LIVE}
    told(f"Payload server {name} is live; workers write to it within a second.", record, as_json)


@app.command("drain")
def drain(
    name: Annotated[str, typer.Argument(help="Its name.", autocompletion=completion.payload_servers)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    wait: Annotated[bool, typer.Option(help="Wait until it is empty; otherwise only begin.")] = True,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop writing to a server, and wait until its payloads are trained and freed. It may be stopped then."""
    from penstock.console.progress import Steps
    from penstock.payloads import servers as payload_servers
    from penstock.payloads.store import open_store

    target = Target(run, redis, directory)
    if not goes_on(f"drain {_about(target, name)}", {"would_drain": name}, yes=yes, dry_run=dry_run, as_json=as_json):
        return
    server = payload_servers.set_state(target.client, target.keys, name, payload_servers.ServerState.DRAINING)
    draining = {"name": name, "state": payload_servers.ServerState.DRAINING}
    if not wait or not as_json:
        told(f"Payload server {name} is draining; what lies there is still read.", draining, as_json)
    if not wait:
        return
    with contextlib.closing(open_store(server.url)) as store, Steps(f"draining {name}", hidden=as_json) as steps:
        store.check()
        most = 0
        while not (state := payload_servers.drain(target.client, store, target.keys, server)).done:
            # Late writers may still add payloads.
            most = max(most, state.left)
            steps.at(most - state.left, f"waiting for {state.words()}", total=most or None)
            time.sleep(LOOK_S)
    payload_servers.set_state(target.client, target.keys, name, payload_servers.ServerState.DRAINED)
    done = {"name": name, "state": payload_servers.ServerState.DRAINED}
    told(f"Payload server {name} is empty and may be stopped.", done, as_json)


@app.command("lose")
def lose(
    name: Annotated[str, typer.Argument(help="Its name.", autocompletion=completion.payload_servers)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Abandon a server that will not come back: its samples become rows with mask 0, and are counted."""
    from penstock.payloads import servers as payload_servers

    target = Target(run, redis, directory)
    what = f"abandon {_about(target, name)} for good, with all its payloads"
    if not goes_on(what, {"would_lose": name}, yes=yes, dry_run=dry_run, as_json=as_json):
        return
    payload_servers.set_state(target.client, target.keys, name, payload_servers.ServerState.LOST)
    lost = f"Payload server {name} is lost: its samples are trained with mask 0, and no part waits for it any more."
    told(lost, {"name": name, "state": payload_servers.ServerState.LOST}, as_json)


def _about(target: Target, name: str) -> str:
    """Describe the server. Raises ConfigError if it is unknown."""
    from penstock.payloads.servers import read
    from penstock.text import redact

    server = read(target.client, target.keys).named(name)
    return f"payload server {name} at {redact(server.url)} ({server.state})"


def register(parent: typer.Typer) -> None:
    """Add these commands to ``penstock``."""
    parent.add_typer(app, name="payloads")
