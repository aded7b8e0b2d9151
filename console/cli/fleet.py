"""``penstock fleet``: plan, run, list and scale a fleet of engines."""

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.console.cli.command import (
    OVERRIDES,
    Answer,
    Change,
    command,
    many,
)
from penstock.console.cli.nouns import show_list
from penstock.console.cli.target import LiveTarget, Target
from penstock.console.cli.usage import Source
from penstock.console.details import detail_lines
from penstock.console.resources import PROCESSES
from penstock.console.selection import Choice, select
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError

#: Number of autoscaler decisions shown as text; --json has all that are kept.
DECISIONS = 10

fleet_app = typer.Typer(help="Engines in groups: plan, run, scale.")


@command(fleet_app, context_settings=OVERRIDES)
def plan(source: Source, answer: Answer) -> None:
    """Print every process of the fleet: where, on which GPUs and ports, by which command. Starts nothing."""
    from penstock.config.load import load_config

    loaded = load_config(source.path, source.overrides)
    from penstock.workers.fleet.nodes import local_nodes
    from penstock.workers.fleet.plan import plan as lay_out
    from penstock.workers.fleet.show import as_records, as_text

    laid_out = lay_out(loaded, local_nodes(loaded))
    print_json(as_records(laid_out)) if answer.as_json else say(as_text(laid_out))


@command(fleet_app, "ls")
def list_(target: Target, choice: Choice) -> None:
    """List groups and processes of the running fleet, and the addresses of its models."""
    from penstock.console.read.parts import fleet_of
    from penstock.workers.fleet.state import read_state

    state = read_state(target.client, target.keys)
    processes = select(state["processes"], PROCESSES.fields, choice)
    if choice.as_json:
        print_json({**state, "processes": choice.page(processes)})
        return
    fleet = fleet_of(state)
    show_list(PROCESSES, fleet.pop("processes"), choice)
    say("\n".join(detail_lines({**fleet, "decisions": fleet["decisions"][:DECISIONS]})))


@command(fleet_app)
def scale(
    count: Annotated[int, typer.Argument(min=0, metavar="N", help="Engines that the group should have.")],
    target: LiveTarget,
    change: Change,
    group: Annotated[
        str | None, typer.Option("--group", help="MODEL.GROUP; default: the only one that can be scaled.")
    ] = None,
) -> None:
    """Grow or shrink a group of the running fleet. Engines drain before removal, oldest weights first."""
    from penstock.workers.fleet.state import read_state, write_wanted

    groups = read_state(target.client, target.keys)["groups"]
    able = [name for name, one in groups.items() if one["worker_type"] in ("regular", "prefill", "decode")]
    if group is None and len(able) == 1:
        group = able[0]
    if group is None or group not in able:
        raise ConfigError(f"Name one of the fleet's groups with --group: {', '.join(able) or 'none can be scaled'}.")
    running = groups[group]["engines"]
    record = {"group": group, "engines": running, "wanted": count}
    what = f"have {group} grow from {many(running, 'engine')} to {count}"
    if count < running:
        what = f"have {group} drain {many(running - count, 'engine')} of {running}"
    if change.agreed(what, record, ask=count < running):
        write_wanted(target.client, target.keys, group, count)
        change.tell(f"{group}: {many(running, 'engine')} running, {count} wanted", record)


@command(fleet_app)
def engines(
    worker: Annotated[str, typer.Argument(help="Name that the worker was started with.")],
    target: LiveTarget,
    change: Change,
    add: Annotated[list[str] | None, typer.Option("--add", metavar="URL", help="Put an engine behind it.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="URL", help="Take one out.")] = None,
) -> None:
    """Show or change the engines behind a worker's router while it runs."""
    from penstock.protocol.snapshot import snapshot
    from penstock.workers.router.members import member_of, read_members, write_members

    present = snapshot(target.client, target.keys)["workers"]
    mine = next((one for one in present if one.started_as == worker), None)
    if mine is None or not mine.engines:
        raise ConfigError(f"There is no worker {worker!r} with a router; `penstock workers ls` lists the present ones.")
    members = read_members(target.client, target.keys, worker) or [
        member_of(
            {"url": one.url, "worker_type": one.worker_type, "bootstrap_port": one.bootstrap_port},
            f"What worker {worker} shows of its engines",
        )
        for one in mine.engines
    ]
    for url in remove or []:
        if url.rstrip("/") not in {member.url for member in members}:
            raise ConfigError(f"{url} is not behind worker {worker}: it has {', '.join(m.url for m in members)}.")
        members = [member for member in members if member.url != url.rstrip("/")]
    for url in add or []:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"invalid --add {url}: give the address of a server, http://HOST:PORT.")
        others = [member for member in members if member.url != url.rstrip("/")]
        members = [*others, member_of({"url": url}, f"--add {url}")]
    wanted = {"engines": mine.engines, "wanted": [member.model_dump() for member in members]}
    if add or remove:
        what = f"have worker {worker} generate with {', '.join(member.url for member in members) or 'no engine'}"
        if not change.agreed(what, wanted, ask=bool(remove)):
            return
        write_members(target.client, target.keys, worker, members)
    if change.as_json:
        print_json(wanted)
        return
    rows = [asdict(engine) for engine in mine.engines]
    table(rows, ["url", "worker_type", "state", "version", "why"], f"engines of {worker}")
    if add or remove:
        say(f"wanted: {', '.join(member.url for member in members)}")
