"""``penstock jobs``: list, show and cancel jobs."""

from typing import Annotated

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
)
from penstock.console.cli.lists import AfterOption, Choice, LimitOption, SortOption, WhereOption, show
from penstock.console.cli.target import Target
from penstock.console.terminal import print_json, say, say_fields, table
from penstock.errors import ConfigError

jobs_app = typer.Typer(help="Jobs in the queues.")

JobArgument = Annotated[str, typer.Argument(help="Job id.", autocompletion=completion.jobs)]


@jobs_app.command("ls")
def jobs_ls(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    state: Annotated[str | None, typer.Option(help="queued, leased, delayed, dead, ready or retiring.")] = None,
    where: WhereOption = None,
    sort: SortOption = "job",
    limit: LimitOption = None,
    after: AfterOption = 0,
    as_json: JsonOption = False,
) -> None:
    """List jobs with their state, lane, version and attempts."""
    from penstock.console.read.jobs import FIELDS, list_jobs
    from penstock.records.job import JobState

    if state is not None and state not in set(JobState):
        raise ConfigError(f"--state {state}: a job is {', '.join(JobState)}.")
    target = Target(run, redis, directory)
    wanted = [*(where or ()), *([f"state={state}"] if state else [])]
    rows = list_jobs(target.client, target.keys)
    show(rows, FIELDS, FIELDS, "jobs", Choice(wanted, sort, limit, as_json, after))


@jobs_app.command("show")
def jobs_show(
    job: JobArgument,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one job: its state, what was admitted, its samples, and its state in subscriptions."""
    from penstock.console.read.jobs import read_job

    target = Target(run, redis, directory)
    found = read_job(target.client, target.keys, job)
    if found is None:
        raise ConfigError(f"There is no job {job!r}, or it is retired; `penstock jobs ls` lists the existing ones.")
    if as_json:
        print_json(found)
        return
    samples, subscriptions, record = (found.pop(name) for name in ("samples", "subscriptions", "record"))
    say_fields({name: value for name, value in found.items() if value not in (None, "")})
    if isinstance(record, dict):
        say_fields({name: value for name, value in record.items() if name not in found and name != "id"})
    else:
        say(f"record: {record}")
    columns = ["k", "status", "reward", "length", "num_generated", "oldest", "newest", "worker", "server"]
    table([row for row in samples if "k" in row], columns, "samples")
    for row in samples:
        if why := row.get("unreadable"):
            say(why)
    rows = [{"subscription": name, **one} for name, one in sorted(subscriptions.items())]
    table(rows, ["subscription", "uses", "batch", "given_up"], "subscriptions")


@jobs_app.command("cancel")
def jobs_cancel(
    jobs: Annotated[list[str], typer.Argument(help="Job ids.", autocompletion=completion.jobs)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cancel jobs, whatever state they are in; a job in a batch that a trainer may still read is kept."""
    from penstock.protocol import scripts

    target = Target(run, redis, directory)
    if dry_run:
        _would_cancel(target, jobs, as_json)
        return
    agree(f"cancel {many(len(jobs), 'job')} for good", yes=yes)
    subs = target.subs()
    found = {job: scripts.run(target.client, scripts.cancel(target.keys, job, subs)) for job in jobs}
    if as_json:
        print_json(found)
    else:
        for job, state in found.items():
            says = {
                "": "there is no such job",
                scripts.HELD_BY_BATCH: "it stays: a batch that a trainer may read again holds it",
            }
            say(f"{job}: {says.get(state, f'cancelled, it was {state}')}")
    if any(state in ("", scripts.HELD_BY_BATCH) for state in found.values()):
        raise typer.Exit(1)


def _would_cancel(target: Target, jobs: list[str], as_json: bool) -> None:
    from penstock.console.read.jobs import read_job

    found = {job: (read_job(target.client, target.keys, job) or {}).get("state", "") for job in jobs}
    if as_json:
        print_json(found)
        return
    for job, state in found.items():
        say(f"{job}: {f'would be cancelled, it is {state}' if state else 'there is no such job'}")
