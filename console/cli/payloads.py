"""``penstock payloads add``, ``drain`` and ``lose``: change the payload servers of a running run."""

import contextlib
import time
from typing import Annotated

import typer

from penstock.console.cli.command import Answer, Change, command
from penstock.console.cli.target import LiveTarget
from penstock.errors import ConfigError

#: Seconds between two checks of a draining server.
LOOK_S = 0.5
NameArgument = Annotated[str, typer.Argument(help="Its name.")]


def add(
    name: Annotated[str, typer.Argument(help="Its name; samples record it.")],
    url: Annotated[
        str, typer.Argument(help="Address (redis://[:PASSWORD@]HOST:PORT/DB) that all workers and trainers can reach.")
    ],
    target: LiveTarget,
    answer: Answer,
) -> None:
    """Let workers write to one more server; a drained one becomes live again."""
    from penstock.config.redis import check_url
    from penstock.payloads import servers
    from penstock.payloads.store import open_store

    try:
        with contextlib.closing(open_store(check_url(url))) as store:
            store.check()
    except ValueError as exc:
        raise ConfigError(f"The URL {exc}.") from exc
    servers.add(target.client, target.keys, name, url)
    record = {"name": name, "state": servers.ServerState.LIVE}
    answer.tell(f"Payload server {name} is live; workers write to it within a second.", record)


def drain(
    name: NameArgument,
    target: LiveTarget,
    change: Change,
    wait: Annotated[bool, typer.Option(help="Wait until it is empty; otherwise only begin.")] = True,
) -> None:
    """Stop writing to a server, and wait until its payloads are trained and freed. It may be stopped then."""
    from penstock.console.progress import Steps
    from penstock.payloads import servers
    from penstock.payloads.store import open_store

    if not change.agreed(f"drain {_about(target, name)}", {"would_drain": name}):
        return
    server = servers.set_state(target.client, target.keys, name, servers.ServerState.DRAINING)
    if not wait or not change.as_json:
        record = {"name": name, "state": servers.ServerState.DRAINING}
        change.tell(f"Payload server {name} is draining; what lies there is still read.", record)
    if not wait:
        return
    with contextlib.closing(open_store(server.url)) as store, Steps(f"draining {name}", hidden=change.as_json) as steps:
        store.check()
        most = 0
        while not (state := servers.drain(target.client, store, target.keys, server)).done:
            # Late writers may still add payloads.
            most = max(most, state.left)
            steps.at(most - state.left, f"waiting for {state.words()}", total=most or None)
            time.sleep(LOOK_S)
    servers.set_state(target.client, target.keys, name, servers.ServerState.DRAINED)
    done = {"name": name, "state": servers.ServerState.DRAINED}
    change.tell(f"Payload server {name} is empty and may be stopped.", done)


def lose(name: NameArgument, target: LiveTarget, change: Change) -> None:
    """Abandon a server that will not come back: its samples become rows with mask 0, and are counted."""
    from penstock.payloads import servers

    if not change.agreed(f"abandon {_about(target, name)} for good, with all its payloads", {"would_lose": name}):
        return
    servers.set_state(target.client, target.keys, name, servers.ServerState.LOST)
    lost = f"Payload server {name} is lost: its samples are trained with mask 0, and no part waits for it any more."
    change.tell(lost, {"name": name, "state": servers.ServerState.LOST})


def _about(target: LiveTarget, name: str) -> str:
    """Describe the server. Raises ConfigError if it is unknown."""
    from penstock.payloads.servers import read
    from penstock.text import redact

    server = read(target.client, target.keys).named(name)
    return f"payload server {name} at {redact(server.url)} ({server.state})"


def register(app: typer.Typer) -> None:
    """Add these commands to ``penstock payloads``."""
    for verb in (add, drain, lose):
        command(app)(verb)
