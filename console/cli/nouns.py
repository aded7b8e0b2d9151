"""`penstock NOUN ls` and `NOUN show`, made from the table of resources, and the verbs that change jobs and lanes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.console.cli.command import Answer, Change, WhereOption, agree, command, many, operator
from penstock.console.cli.target import LiveTarget, Target
from penstock.console.details import detail_lines
from penstock.console.resources import NEXT, RESOURCES, Resource, Row, cells
from penstock.console.selection import Choice, select
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError
from penstock.names import LANES, Lane

#: Default command of ``penstock buffer``.
SERVE = "serve"
#: Jobs of each lane that peek shows by default.
PEEKED = 10


class _ServesByDefault(TyperGroup):
    """Run ``penstock buffer --config FILE --a.b=c`` as ``penstock buffer serve --config FILE --a.b=c``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [SERVE, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == SERVE else name, command, rest


#: The group of commands of each resource.
APPS = {
    name: typer.Typer(help=one.noun, cls=_ServesByDefault if name == "buffer" else None)
    for name, one in RESOURCES.items()
}
#: Of each resource that is shown in detail: help of the argument, and the error if it does not exist.
_SHOWN = {
    "jobs": ("Job id.", "There is no job {!r}, or it is retired"),
    "dead": ("Job id.", "Job {!r} is not a dead letter"),
    "workers": ("Its name, or the one that it was started with.", "There is no worker {!r}"),
    "data": ("DATASET/LINE, as `penstock trace` has it.", "Nothing was counted of prompt {}"),
}
JobsArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id.")]
AllOption = Annotated[bool, typer.Option("--all", help="Select all jobs.")]


def show_list(resource: Resource, rows: Sequence[Row], choice: Choice) -> None:
    """Print the rows selected by ``choice``, and below the table what is wrong with them.

    Raises:
        ConfigError: a filter or the sort order names an unknown field, or is malformed.
    """
    chosen = select(rows, resource.fields, choice)
    shown = choice.page(chosen)
    if choice.as_json:
        print_json([dict(row) for row in shown])
        return
    show_table(resource, shown)
    end = choice.after + len(shown)
    if (left := len(chosen) - end) > 0:
        say(f"{left} more: --after {end} continues, --limit {len(chosen)} shows all", err=True)


def show_table(resource: Resource, rows: Sequence[Row]) -> None:
    """Print rows as a table, and below it reasons that may have many lines."""
    names = [one.name for one in resource.shown]
    table(cells(resource.shown, rows), names, resource.title)
    for row in rows:
        for field in {"why", "unreadable"} - set(names):
            if reason := row.get(field):
                say(f"{row[names[0]]}: {reason}")


def _add_list(name: str, resource: Resource) -> None:
    def ls(target: Target, choice: Choice) -> None:
        rows = resource.rows(target.client, target.keys)
        show_list(resource, rows, replace(choice, sort=choice.sort or resource.sort))
        if not choice.as_json:
            _add_notes(name, rows, choice)

    ls.__doc__ = resource.about
    command(APPS[name], "ls", epilog=f"\b\n{resource.meanings()}")(ls)


def _add_notes(name: str, rows: Sequence[Row], choice: Choice) -> None:
    if name == "dead":
        from penstock.protocol.burials import by_length

        counted = [row for row in select(rows, RESOURCES[name].fields, choice) if "prompt_unit" in row]
        if words := by_length(counted):
            say(f"by length of the prompt: {words}", err=True)
    elif name == "payloads" and not any(row["state"] == "live" for row in rows):
        say("Payloads go to the control Redis.")


def _add_show(name: str, resource: Resource) -> None:
    about, missing = _SHOWN[name]

    def show(
        one: Annotated[str, typer.Argument(metavar=resource.key[0].upper(), help=about)],
        target: Target,
        answer: Answer,
    ) -> None:
        found = resource.details(target.client, target.keys, one)
        if found is None:
            raise ConfigError(f"{missing.format(one)}; `penstock {name} ls` lists what there is.")
        if answer.as_json:
            print_json(found)
        else:
            say("\n".join(detail_lines(found, resource)))

    show.__doc__ = f"Show one of the {resource.title} with all that is known of it."
    command(APPS[name], "show")(show)


for _name, _resource in RESOURCES.items():
    _add_list(_name, _resource)
    if _resource.one:
        _add_show(_name, _resource)


@command(APPS["jobs"], "cancel")
def jobs_cancel(
    jobs: Annotated[list[str], typer.Argument(help="Job ids.")],
    target: LiveTarget,
    change: Change,
) -> None:
    """Cancel jobs, whatever state they are in; a job in a batch that a trainer may still read is kept."""
    from penstock.console.read.jobs import read_job
    from penstock.protocol import scripts

    says = {
        "": "there is no such job",
        scripts.HELD_BY_BATCH: "it stays: a batch that a trainer may read again holds it",
    }
    words = "would be cancelled, it is {}" if change.dry_run else "cancelled, it was {}"
    if change.dry_run:
        found = {job: (read_job(target.client, target.keys, job) or {}).get("state", "") for job in jobs}
    else:
        agree(f"cancel {many(len(jobs), 'job')} for good", yes=change.yes)
        subs = target.subs()
        found = {job: scripts.run(target.client, scripts.cancel(target.keys, job, subs)) for job in jobs}
    lines = (f"{job}: {says.get(state, words.format(state))}" for job, state in found.items())
    change.tell("\n".join(lines), found)
    if not change.dry_run and says.keys() & set(found.values()):
        raise typer.Exit(1)


@command(APPS["dead"], "requeue")
def dead_requeue(
    target: LiveTarget, change: Change, job: JobsArgument = None, every: AllOption = False, where: WhereOption = None
) -> None:
    """Requeue dead-lettered jobs with all their attempts: one, those of a filter, or all."""
    letters = _letters(target, job, every, where)
    if not change.dry_run and job is None and letters:
        agree(f"queue {many(len(letters), 'dead-lettered job')} again", yes=change.yes)
    done = letters if change.dry_run else target.requeue(letters)
    _tell_done(job, done, "queued again", change)


@command(APPS["dead"], "purge")
def dead_purge(
    target: LiveTarget, change: Change, job: JobsArgument = None, every: AllOption = False, where: WhereOption = None
) -> None:
    """Purge dead-lettered jobs for good, with their letters: one, those of a filter, or all."""
    letters = _letters(target, job, every, where)
    if not change.dry_run and letters:
        agree(f"purge {many(len(letters), 'dead-lettered job')} for good", yes=change.yes, must_say=True)
    done = letters if change.dry_run else target.purge(letters)
    _tell_done(job, done, "purged", change)


def _tell_done(job: str | None, done: Sequence[str], how: str, change: Change) -> None:
    if job is not None and not done:
        raise _not_dead(job)
    change.tell(f"{len(done)} jobs {'would be' if change.dry_run else 'are'} {how}", done)


def _letters(target: Target, job: str | None, every: bool, where: Sequence[str] | None) -> list[str]:
    """Return ids of the selected dead-lettered jobs. Raises ConfigError if the selection is unclear."""
    if (job is not None) + every + bool(where) != 1:
        raise ConfigError("Select jobs: give the id of one, --where FIELD=VALUE, or --all.")
    if job is not None:
        if target.client.hget(target.keys.group(job), "st") != b"dead":
            raise _not_dead(job)
        return [job]
    dead = RESOURCES["dead"]
    rows = select(dead.rows(target.client, target.keys), dead.fields, Choice(where or ()))
    return [row["job"] for row in rows if row["job"]]


def _not_dead(job: str) -> ConfigError:
    return ConfigError(f"{_SHOWN['dead'][1].format(job)}; `penstock dead ls` lists those that are.")


LaneArgument = Annotated[Lane, typer.Argument(help="The lane.")]


def pause(lane: LaneArgument, target: LiveTarget, answer: Answer) -> None:
    """Pause a lane: lease no more of its jobs until `penstock resume`; leased jobs continue."""
    from penstock.protocol.user_failures import pause as pause_

    changed = pause_(target.client, target.keys, lane, operator())
    words = "is paused; leased jobs continue" if changed else "was paused already"
    answer.tell(f"lane {lane} {words}", {"lane": lane.value, "changed": changed})


def resume(lane: LaneArgument, target: LiveTarget, answer: Answer) -> None:
    """Lease jobs of a paused lane again."""
    from penstock.protocol.user_failures import resume as resume_

    changed = resume_(target.client, target.keys, lane)
    answer.tell(
        f"lane {lane} {'is resumed' if changed else 'was not paused'}", {"lane": lane.value, "changed": changed}
    )


def peek(
    target: Target,
    choice: Choice,
    lane: Annotated[Lane | None, typer.Argument(help="The lane; default: all, as engines look at them.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="What an engine of this version would get.")] = None,
) -> None:
    """Show the next jobs as an engine would get them; changes nothing. --limit (10) and --after are per lane."""
    from penstock.console.read.lanes import upcoming

    lanes = LANES if lane is None else (lane,)
    most = choice.after + (choice.limit or PEEKED)
    rows = upcoming(target.client, target.keys, lanes, most=most, version=version)
    rows = [row for row in rows if row["place"] > choice.after]
    show_list(NEXT, rows, replace(choice, limit=len(rows) or None, after=0))


@command(APPS["subs"], "set")
def subs_set(
    name: Annotated[str, typer.Argument(help="The subscription.")],
    fields: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help="As under trainer.subscription.")],
    target: LiveTarget,
    answer: Answer,
) -> None:
    """Change a subscription from its next batch on, or create one. FIELD= resets a field."""
    from penstock.protocol.subs import set_subscription

    changes = {}
    for given in fields:
        field, equals, value = given.partition("=")
        if not equals or not field:
            raise ConfigError(f"invalid field {given!r}: give FIELD=VALUE, such as size=64.")
        changes[field] = value
    definition = set_subscription(target.client, target.keys, name, changes)
    fields_now = ", ".join(f"{field} {value}" for field, value in sorted(definition.items()))
    answer.tell(f"{name}: {fields_now}", {"name": name, **definition})


@command(APPS["subs"], "drop")
def subs_drop(
    name: Annotated[str, typer.Argument(help="The subscription.")],
    target: LiveTarget,
    change: Change,
) -> None:
    """Drop a subscription with its batches, for good; nothing waits for it any more."""
    from penstock.protocol.subs import drop_subscription

    rows = {row["name"]: row for row in RESOURCES["subs"].rows(target.client, target.keys)}
    if name not in rows:
        raise ConfigError(f"There is no subscription {name!r} to drop; `penstock subs ls` lists those that exist.")
    running = ", whose trainer is running" if rows[name]["owned"] else ""
    held = f", with {many(rows[name]['held_groups'], 'group')} held for it" if "held_groups" in rows[name] else ""
    if change.agreed(f"drop subscription {name}{running}{held} for good", {"would_drop": name}):
        drop_subscription(target.client, target.keys, name)
        change.tell(f"subscription {name} is dropped", {"dropped": name})


def register(app: typer.Typer) -> None:
    """Add the groups of commands, and those about lanes, to ``penstock``."""
    for verb in (pause, resume, peek):
        command(app)(verb)
    for name, noun in APPS.items():
        app.add_typer(noun, name=name)
