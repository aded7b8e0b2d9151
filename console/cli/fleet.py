"""``penstock fleet``: plan, run, list and scale a fleet of engines."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.confirm import (
    DIRECTORY,
    OVERRIDES,
    ConfigOption,
    DryRunOption,
    FolderOption,
    JsonOption,
    LogFormatOption,
    RedisOption,
    RunArgument,
    UrlOption,
    YesOption,
    goes_on,
    many,
    told,
)
from penstock.console.cli.history.samples import clock
from penstock.console.cli.lists import Choice, list_of_run, page, select, show
from penstock.console.cli.target import Target
from penstock.console.cli.usage import overrides_of
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError

#: Fields of a process, for filters and sort order.
_PROCESS = ("name", "kind", "host", "state", "pid", "starts", "why")

#: Number of autoscaler decisions shown as text; --json has all that are kept.
DECISIONS = 10

fleet_app = typer.Typer(help="Engines in groups: plan, run, scale.")


@fleet_app.command(context_settings=OVERRIDES)
def plan(context: typer.Context, config: ConfigOption, redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Print every process of the fleet: where, on which GPUs and ports, by which command. Starts nothing."""
    from penstock.config.load import load_config

    loaded = load_config(config, overrides_of(context))
    from penstock.workers.fleet.nodes import local_nodes
    from penstock.workers.fleet.plan import plan as lay_out
    from penstock.workers.fleet.show import as_records, as_text

    laid_out = lay_out(loaded, local_nodes(loaded))
    if as_json:
        print_json(as_records(laid_out))
    else:
        say(as_text(laid_out))


@fleet_app.command(context_settings=OVERRIDES)
def up(
    context: typer.Context, config: ConfigOption, redis: RedisOption = None, log_format: LogFormatOption = None
) -> None:
    """Start the engines and workers of the fleet and keep them up, until SIGTERM or Ctrl-C: workers drain then."""
    from penstock.console.cli.part import run_part

    run_part("workers", "fleet", config, overrides_of(context), module="penstock.workers.fleet.main")


@fleet_app.command("ls")
@list_of_run
def list_(target: Target, choice: Choice) -> None:
    """List groups and processes of the running fleet, and the addresses of its models."""
    from penstock.console.read.workers import decisions_of
    from penstock.workers.fleet.state import read_state

    state = read_state(target.client, target.keys)
    if choice.as_json:
        print_json({**state, "processes": page(select(state["processes"], _PROCESS, choice), choice)})
        return
    groups = [{"group": name, **group} for name, group in state["groups"].items()]
    table(groups, ["group", "worker_type", "engines", "leaving", "refused"], f"fleet on {state['host']}")
    show(state["processes"], _PROCESS, _PROCESS, "processes", choice)
    if auto := state.get("autoscale"):
        each = auto["capacity_tokens_per_s"]
        of_one = f"; a worker with full slots draws {each:.0f} tokens/s" if each else ""
        say(f"autoscaler: {auto['engines']} of {auto['group']}; wanted {auto['wanted']}, {auto['binds']} binds{of_one}")
        decided = decisions_of(auto)
        which = f"decisions, the latest {DECISIONS} of {len(decided)}" if len(decided) > DECISIONS else "decisions"
        shown = [_decision(one) for one in decided[:DECISIONS]]
        table(shown, ("at", "engines", "wanted", "binds", "terms"), which)
    for model, url in state["endpoints"].items():
        say(f"model {model} answers at {url}")


def _decision(one: Mapping[str, Any]) -> dict[str, Any]:
    at, terms = one["at"], one["terms"]
    return {
        "at": clock(at) if isinstance(at, int | float) else at,
        "engines": f"{one['before']} -> {one['engines']}",
        "wanted": one["wanted"],
        "binds": one["binds"],
        "terms": ", ".join(f"{name} {count}" for name, count in terms.items()) if isinstance(terms, dict) else terms,
    }


@fleet_app.command()
def scale(
    count: Annotated[int, typer.Argument(min=0, metavar="N", help="Engines that the group should have.")],
    group: Annotated[
        str | None, typer.Option("--group", help="MODEL.GROUP; default: the only one that can be scaled.")
    ] = None,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Grow or shrink a group of the running fleet. Engines drain before removal, oldest weights first."""
    from penstock.workers.fleet.state import read_state, write_wanted

    target = Target(run, redis, directory)
    groups = read_state(target.client, target.keys)["groups"]
    able = [name for name, one in groups.items() if one["worker_type"] in ("regular", "prefill", "decode")]
    if group is None and len(able) == 1:
        group = able[0]
    if group is None or group not in able:
        raise ConfigError(f"Name one of the fleet's groups with --group: {', '.join(able) or 'none can be scaled'}.")
    there = groups[group]["engines"]
    record = {"group": group, "engines": there, "wanted": count}
    what = f"have {group} grow from {many(there, 'engine')} to {count}"
    if count < there:
        what = f"have {group} drain {many(there - count, 'engine')} of {there}"
    if not goes_on(what, record, yes=yes or count >= there, dry_run=dry_run, as_json=as_json):
        return
    write_wanted(target.client, target.keys, group, count)
    told(f"{group}: {many(there, 'engine')} there, {count} wanted", record, as_json)


@fleet_app.command()
def engines(
    worker: Annotated[
        str, typer.Argument(help="Name that the worker was started with.", autocompletion=completion.workers)
    ],
    add: Annotated[list[str] | None, typer.Option("--add", metavar="URL", help="Put an engine behind it.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="URL", help="Take one out.")] = None,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show or change the engines behind a worker's router while it runs."""
    from penstock.protocol.snapshot import snapshot
    from penstock.workers.router.members import member_of, read_members, write_members

    target = Target(run, redis, directory)
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
            raise ConfigError(f"--add {url} is not the address of a server; write http://HOST:PORT.")
        others = [member for member in members if member.url != url.rstrip("/")]
        members = [*others, member_of({"url": url}, f"--add {url}")]
    wanted = {"engines": mine.engines, "wanted": [member.model_dump() for member in members]}
    if add or remove:
        what = f"have worker {worker} draw with {', '.join(member.url for member in members) or 'no engine'}"
        if not goes_on(what, wanted, yes=yes or not remove, dry_run=dry_run, as_json=as_json):
            return
        write_members(target.client, target.keys, worker, members)
    if as_json:
        print_json(wanted)
        return
    rows = [asdict(engine) for engine in mine.engines]
    table(rows, ["url", "worker_type", "state", "version", "why"], f"engines of {worker}")
    if add or remove:
        say(f"wanted: {', '.join(member.url for member in members)}")
