"""`penstock subs`: list, create, change and drop subscriptions of a running run."""

from collections.abc import Mapping
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
    many,
    told,
)
from penstock.console.cli.lists import Choice, list_of_run, show
from penstock.console.cli.target import Target
from penstock.console.terminal import say
from penstock.errors import ConfigError

subs_app = typer.Typer(help="Subscriptions of trainers.")

#: Columns of the list.
COLUMNS = ("name", "state", "share", "batch", "sampler", "cut", "cursor", "ckpt", "held", "drops")


@subs_app.command("ls")
@list_of_run
def subs_ls(target: Target, choice: Choice) -> None:
    """List subscriptions with definition, position, held groups, and disposals by reason."""
    from penstock.protocol.subs import LISTED, list_subscriptions

    rows = [{**row, "state": _state(row)} for row in list_subscriptions(target.client, target.keys)]
    shown = show(rows, ("state", *LISTED), COLUMNS, "subscriptions", choice, _shown)
    for row in shown:
        if not choice.as_json and (why := row.get("unreadable")):
            say(why)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format a subscription for the table."""
    if "unreadable" in row:
        return dict(row)
    return {
        **row,
        "batch": f"{row['size']} {row['unit']}",
        "held": row["held_groups"],
        "drops": ", ".join(f"{reason} {count}" for reason, count in sorted(row["drops"].items())),
    }


def _state(row: Mapping[str, Any]) -> str:
    if "unreadable" in row:
        return "unreadable"
    return "parked" if row["parked"] else "owned" if row["owned"] else "absent"


@subs_app.command("set")
def subs_set(
    name: Annotated[str, typer.Argument(help="The subscription.", autocompletion=completion.subscriptions)],
    fields: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help="As under trainer.subscription.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Change a subscription from its next batch on, or create one. FIELD= resets a field."""
    from penstock.protocol.subs import set_subscription

    changes = {}
    for given in fields:
        field, equals, value = given.partition("=")
        if not equals or not field:
            raise ConfigError(f"{given!r} sets nothing: write FIELD=VALUE, such as size=64.")
        changes[field] = value
    target = Target(run, redis, directory)
    definition = set_subscription(target.client, target.keys, name, changes)
    fields_now = ", ".join(f"{field} {value}" for field, value in sorted(definition.items()))
    told(f"{name}: {fields_now}", {"name": name, **definition}, as_json)


@subs_app.command("drop")
def subs_drop(
    name: Annotated[str, typer.Argument(help="The subscription.", autocompletion=completion.subscriptions)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Drop a subscription with its batches, for good; nothing waits for it any more."""
    from penstock.protocol.subs import drop_subscription

    target = Target(run, redis, directory)
    what = _would_drop(target, name)
    if not goes_on(what, {"would_drop": name}, yes=yes, dry_run=dry_run, as_json=as_json):
        return
    drop_subscription(target.client, target.keys, name)
    told(f"subscription {name} is dropped", {"dropped": name}, as_json)


def _would_drop(target: Target, name: str) -> str:
    """Describe the effects of dropping it. Raises ConfigError if it does not exist."""
    from penstock.protocol.subs import list_subscriptions

    rows = {row["name"]: row for row in list_subscriptions(target.client, target.keys)}
    if name not in rows:
        raise ConfigError(f"There is no subscription {name!r} to drop; `penstock subs ls` lists those that exist.")
    row = rows[name]
    there = ", whose trainer is running" if row["owned"] else ""
    held = f", with {many(row['held_groups'], 'group')} held for it" if "held_groups" in row else ""
    return f"drop subscription {name}{there}{held} for good"
