"""``penstock pause``, ``resume`` and ``peek``: pause, resume and inspect lanes."""

from typing import Annotated, Any

import typer

from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption, operator, told
from penstock.console.cli.lists import AfterOption, Choice, LimitOption, Row, SortOption, WhereOption, show
from penstock.console.cli.target import Target
from penstock.names import LANES, Lane

LaneArgument = Annotated[Lane, typer.Argument(help="The lane.")]

#: Jobs of each lane that peek shows by default, and characters of a prompt that it shows.
PEEKED = 10
PROMPT_CHARS = 60


def pause(
    lane: LaneArgument,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Pause a lane: lease no more of its jobs until `penstock resume`; leased jobs continue."""
    from penstock.protocol.user_failures import pause as close

    target = Target(run, redis, directory)
    changed = close(target.client, target.keys, lane, operator())
    _say(lane, changed, as_json, done="is paused; leased jobs continue", before="was paused already")


def resume(
    lane: LaneArgument,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Lease jobs of a paused lane again."""
    from penstock.protocol.user_failures import resume as open_

    target = Target(run, redis, directory)
    changed = open_(target.client, target.keys, lane)
    _say(lane, changed, as_json, done="is resumed", before="was not paused")


def _say(lane: Lane, changed: bool, as_json: bool, *, done: str, before: str) -> None:
    told(f"lane {lane} {done if changed else before}", {"lane": lane.value, "changed": changed}, as_json)


def peek(
    lane: Annotated[Lane | None, typer.Argument(help="The lane; default: all, as engines look at them.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="What an engine of this version would get.")] = None,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    where: WhereOption = None,
    sort: SortOption = None,
    limit: LimitOption = None,
    after: AfterOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the next jobs as an engine would get them; changes nothing. --limit (10) and --after are per lane."""
    from penstock.console.read.lanes import FIELDS, upcoming

    target = Target(run, redis, directory)
    lanes = LANES if lane is None else (lane,)
    rows = upcoming(target.client, target.keys, lanes, most=after + (limit or PEEKED), version=version)
    rows = [row for row in rows if row["place"] > after]
    columns = ["job", "lane", "place", "not_before", "attempts", "crashes", "n", "prompt", "held_by"]
    choice = Choice(where or (), sort, len(rows) or None, as_json)
    show(rows, FIELDS, columns, "next jobs", choice, _in_words)


def _in_words(row: Row) -> dict[str, Any]:
    prompt = str(row["prompt"])
    return {**row, "prompt": prompt if len(prompt) <= PROMPT_CHARS else f"{prompt[:PROMPT_CHARS]}..."}


def register(app: typer.Typer) -> None:
    """Add these commands to ``penstock``."""
    app.command()(pause)
    app.command()(resume)
    app.command()(peek)
