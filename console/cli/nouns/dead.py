"""``penstock dead``: list, show, requeue and purge dead-lettered jobs."""

from collections.abc import Sequence
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
    agree,
    many,
    told,
)
from penstock.console.cli.lists import Choice, Row, WhereOption, list_of_run, select, show
from penstock.console.cli.target import Target
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError

dead_app = typer.Typer(help="Buried jobs.")

JobsArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id.", autocompletion=completion.buried)]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]

#: Most characters of the last line of a traceback in the list.
_DETAIL_CHARS = 80


@dead_app.command("ls")
@list_of_run
def dead_ls(target: Target, choice: Choice) -> None:
    """List dead-lettered jobs, oldest first, and how long they are."""
    from penstock.console.read.jobs import DEAD_FIELDS, list_dead
    from penstock.protocol.burials import by_length

    columns = ["job", "reason", "attempts", "crashes", "worker", "prompt", "drawn", "detail"]
    rows = list_dead(target.client, target.keys)
    show(rows, DEAD_FIELDS, columns, "dead letters", choice, _in_words)
    counted = [row for row in select(rows, DEAD_FIELDS, choice) if "prompt_unit" in row]
    if not choice.as_json and (words := by_length(counted)):
        say(f"by length of the prompt: {words}", err=True)


def _in_words(row: Row) -> dict[str, Any]:
    return {
        **row,
        "detail": row["detail"].strip().splitlines()[-1][:_DETAIL_CHARS] if row["detail"].strip() else "",
        "prompt": f"{row['prompt_length']} {row['prompt_unit']}" if "prompt_unit" in row else "",
        "drawn": ", ".join(map(str, row.get("drawn", ()))),
    }


@dead_app.command("show")
def dead_show(
    job: Annotated[str, typer.Argument(help="Job id.", autocompletion=completion.buried)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one dead-lettered job, with its prompt and traceback."""
    from penstock.console.read.jobs import letter, show_record

    target = Target(run, redis, directory)
    # Only if the job is dead: else this is the entry of another stream, whose id may be that of another job's letter.
    state, entry = target.client.hmget(target.keys.group(job), "st", "eid")
    found = target.client.xrange(target.keys.dead, entry, entry) if state == b"dead" and entry else []
    if not found:
        raise _not_buried(job)
    row = letter(found[0]) | {"record": show_record(found[0][1].get(b"body", b""), job)}
    if as_json:
        print_json(row)
        return
    for name, value in row.items():
        say(f"{name}: {value}")


@dead_app.command("requeue")
def dead_requeue(
    job: JobsArgument = None,
    every: AllOption = False,
    where: WhereOption = None,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Requeue dead-lettered jobs with all their attempts: one, those of a filter, or all."""
    from penstock.protocol import scripts

    target = Target(run, redis, directory)
    letters = _letters(target, job, every, where)
    if dry_run:
        told(f"{len(letters)} jobs would be queued again", letters, as_json)
        return
    if job is None and letters:
        agree(f"queue {many(len(letters), 'buried job')} again", yes=yes)
    model = next(iter(target.models()), "policy")
    done = [one for one in letters if scripts.run(target.client, scripts.requeue(target.keys, one, model))]
    if job is not None and not done:
        raise _not_buried(job)
    told(f"{len(done)} jobs are queued again", done, as_json)


@dead_app.command("purge")
def dead_purge(
    job: JobsArgument = None,
    every: AllOption = False,
    where: WhereOption = None,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Purge dead-lettered jobs for good, with their letters: one, those of a filter, or all."""
    from penstock.protocol import scripts
    from penstock.records.job import JobState

    target = Target(run, redis, directory)
    letters = _letters(target, job, every, where)
    if dry_run:
        told(f"{len(letters)} jobs would be purged", letters, as_json)
        return
    if letters:
        agree(f"purge {many(len(letters), 'dead-lettered job')} for good", yes=yes, must_say=True)
    subs = target.subs()
    # A job that was requeued meanwhile is kept.
    calls = ((one, scripts.cancel(target.keys, one, subs, only=JobState.DEAD)) for one in letters)
    done = [one for one, call in calls if scripts.run(target.client, call) == JobState.DEAD]
    if job is not None and not done:
        raise _not_buried(job)
    told(f"{len(done)} jobs are purged", done, as_json)


def _letters(target: Target, job: str | None, every: bool, where: Sequence[str] | None) -> list[str]:
    """Return ids of the selected dead-lettered jobs. Raises ConfigError if the selection is unclear."""
    from penstock.console.read.jobs import DEAD_FIELDS, list_dead

    if (job is not None) + every + bool(where) != 1:
        raise ConfigError("Name one job, or give --where FIELD=VALUE, or --all.")
    if job is not None:
        if target.client.hget(target.keys.group(job), "st") != b"dead":
            raise _not_buried(job)
        return [job]
    rows = select(list_dead(target.client, target.keys), DEAD_FIELDS, Choice(where or ()))
    return [row["job"] for row in rows if row["job"]]


def _not_buried(job: str) -> ConfigError:
    return ConfigError(f"Job {job!r} is not buried; `penstock dead ls` lists those that are.")
