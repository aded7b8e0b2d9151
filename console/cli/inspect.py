"""The commands that look into a run: status, why, jobs, dead, workers, audit. Each prints words, or --json."""

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.cli.options import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from console.cli.target import Target
from console.terminal import print_json, say, table
from penstock.errors import ConfigError
from penstock.protocol.records.small_maps import name_shown

if TYPE_CHECKING:
    from penstock.protocol.presence import WorkerPresence

#: Entries shown of a long list.
SHOWN = 50

jobs_app = typer.Typer(help="Jobs in the queues.")

dead_app = typer.Typer(help="Buried jobs.")

workers_app = typer.Typer(help="Workers.")


def _show_workers(workers: "list[WorkerPresence]", columns: list[str]) -> None:
    table([asdict(worker) for worker in workers], columns, "workers")
    # Below the table: reasons may have many lines.
    for worker in workers:
        if worker.why:
            say(f"{worker.name} ({worker.state}): {worker.why}")


def status(
    run: RunArgument = None, redis: UrlOption = None, directory: FolderOption = DIRECTORY, as_json: JsonOption = False
) -> None:
    """Queues, workers, trainers, subscriptions and waits of a run."""
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    state = snapshot(target.client, target.keys)
    if as_json:
        print_json(state)
        return
    policy = f"{state['mode']}, bound {state['bound']}" if state["mode"] else "no trainer has joined yet"
    say(f"run {state['run']}: {policy}, version {state['version']}, step {state['step']}")
    lanes = [{"lane": lane, **counts} for lane, counts in state["lanes"].items()]
    table(lanes, ["lane", "queued", "leased"], "queues")
    say(f"delayed {state['delayed']}, dead {state['dead']}, groups ready {state['ready']}")
    if line := rollback_line(state["counters"]):
        say(line)
    columns = ["name", "engine", "version", "state", "held", "running", "slots", "tokens_per_s", "age_s"]
    _show_workers(state["workers"], columns)
    if state["verifiers"] or state["checks"]:
        table(state["verifiers"], ["name", "host", "state", "checks", "killed", "age_s"], "verifiers")
        say(f"checks queued for verifiers: {state['checks']}")
    table(state["subs"], ["name", "mode", "bound", "cut", "cursor", "ckpt", "disposed", "gen"], "subscriptions")
    for line in ledger_lines(state["subs"]):
        say(line)
    shown = ["name", "rank", "step", "version", "reward_mean", "staleness_max", "wait_share", "age_s"]
    table(state["trainers"], shown, "trainers")
    table(state["waits"], ["who", "what", "since_s"], "waits")


def why(
    run: RunArgument = None, redis: UrlOption = None, directory: FolderOption = DIRECTORY, as_json: JsonOption = False
) -> None:
    """Who waits for what, followed to the part, person or cause that ends it; the longest wait first."""
    from console.cli.why import chains
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    state = snapshot(target.client, target.keys)
    found = chains(state)
    if as_json:
        print_json([chain.to_map() for chain in found])
        return
    if not found:
        say("Nobody waits for longer than a moment.")
    for chain in found:
        for line in chain.lines():
            say(line)
    for line in ledger_lines(state["subs"]):
        say(line)


def ledger_lines(subs: list[dict[str, Any]]) -> list[str]:
    """A line per subscription that gave groups up: how many, by reason, largest first; or that it is unreadable."""
    lines = []
    for sub in subs:
        if why := sub.get("unreadable"):
            lines.append(why)
            continue
        drops = {name[5:]: count for name, count in sub.items() if name.startswith("drop:")}
        if not drops and not sub.get("filter_raised"):
            continue
        words = ", ".join(
            f"{reason} {count}" for reason, count in sorted(drops.items(), key=lambda kv: (-kv[1], kv[0]))
        )
        raised = f"; a filter raised on {sub['filter_raised']} groups" if sub.get("filter_raised") else ""
        lines.append(f"subscription {sub['name']} gave up {sum(drops.values())} groups: {words or 'none'}{raised}")
    return lines


def rollback_line(counters: dict[str, int]) -> str:
    """What Redis forgot after it had acknowledged it, as far as is known; '' where it forgot nothing."""
    lost = {name.partition(":")[2]: count for name, count in counters.items() if name.startswith("rolled_back:")}
    if not lost:
        return ""
    words = ", ".join(f"{name} {count}" for name, count in sorted(lost.items()))
    times = counters.get("rolled_back", 0)
    return f"Redis lost acknowledged writes {times} times (failover, power loss), at least: {words}"


def audit(
    run: RunArgument = None, redis: UrlOption = None, directory: FolderOption = DIRECTORY, as_json: JsonOption = False
) -> None:
    """Recount every job and group from the keys; exit code 1 on a difference."""
    from penstock.protocol.audit import audit as recount
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    report = recount(target.client, target.keys)
    if as_json:
        print_json({**asdict(report), "ok": report.ok})
    else:
        counts = ", ".join(f"{name} {value}" for name, value in asdict(report.recount).items())
        say(f"{counts}; {report.groups} live groups")
        for difference in report.differences:
            say(f"  {difference}")
        if line := rollback_line(snapshot(target.client, target.keys)["counters"]):
            say(line)
        say("ok" if report.ok else f"not ok: lost {report.lost}, duplicated {report.duplicated}")
    if not report.ok:
        raise typer.Exit(1)


@jobs_app.command("ls")
def jobs_ls(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    state: Annotated[str | None, typer.Option(help="queued, leased, delayed, dead, ready or retiring.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs shown.")] = SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Jobs with their state, lane, version and tries."""
    from penstock.protocol.audit import scan_groups
    from penstock.protocol.records.job import JobState

    if state is not None and state not in set(JobState):
        raise ConfigError(f"--state {state}: a job is {', '.join(JobState)}.")
    target = Target(run, redis, directory)
    rows = []
    fields = ["st", "ln", "cl", "c", "n", "nb", "v0", "att", "cr", "own", "seq"]
    names = ["state", "home", "lane", "committed", "n", "not_before", "version", "attempts", "crashes", "worker", "seq"]
    for job in scan_groups(target.client, target.keys):
        values = [name_shown(v or b"") for v in target.client.hmget(target.keys.group(job), fields)]
        row = {"job": job, **dict(zip(names, values, strict=True))}
        if state is None or row["state"] == state:
            rows.append(row)
        if len(rows) >= limit:
            break
    if as_json:
        print_json(rows)
    else:
        table(rows, ["job", *names], f"jobs (at most {limit})")


@jobs_app.command("cancel")
def jobs_cancel(
    jobs: Annotated[list[str], typer.Argument(help="Job ids.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Take jobs out, whatever state they are in; one in a batch that a trainer may still read stays."""
    from penstock.protocol import scripts

    target = Target(run, redis, directory)
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


@dead_app.command("ls")
def dead_ls(
    run: RunArgument = None, redis: UrlOption = None, directory: FolderOption = DIRECTORY, as_json: JsonOption = False
) -> None:
    """Buried jobs, oldest first, and how long they are."""
    from penstock.protocol import burials

    target = Target(run, redis, directory)
    entries = target.client.xrange(target.keys.dead, count=1000)
    found = burials.lengths(target.client, target.keys, [fields for _, fields in entries])
    rows = [_letter(entry) | one for entry, one in zip(entries, found, strict=True)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["detail"] = row["detail"].strip().splitlines()[-1][:80] if row["detail"].strip() else ""
        row["prompt"] = f"{row['prompt_length']} {row['prompt_unit']}" if "prompt_unit" in row else ""
        row["drawn"] = ", ".join(map(str, row.get("drawn", ())))
    table(rows, ["job", "reason", "attempts", "crashes", "worker", "prompt", "drawn", "detail"], "dead letters")
    if words := burials.by_length(found):
        say(f"by length of the prompt: {words}", err=True)


@dead_app.command("show")
def dead_show(
    job: str,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """One buried job, with its prompt and traceback."""
    from penstock.errors import ProtocolError
    from penstock.protocol.records.job import Job

    target = Target(run, redis, directory)
    entry = target.client.hget(target.keys.group(job), "eid")
    found = target.client.xrange(target.keys.dead, entry, entry) if entry else []
    if not found:
        raise ConfigError(f"Job {job!r} is not buried; `penstock dead ls` lists those that are.")
    row = _letter(found[0])
    try:
        row["record"] = asdict(Job.from_bytes(found[0][1].get(b"body", b""), f"record of job {job}"))
    except ProtocolError as exc:
        row["record"] = str(exc)
    if as_json:
        print_json(row)
        return
    for name, value in row.items():
        say(f"{name}: {value}")


@dead_app.command("requeue")
def dead_requeue(
    job: Annotated[str | None, typer.Argument(help="Job id.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Give buried jobs their tries back."""
    from penstock.protocol import scripts

    target = Target(run, redis, directory)
    if (job is None) != every:
        raise ConfigError("Name one job, or give --all.")
    letters = [_letter(entry)["job"] for entry in target.client.xrange(target.keys.dead)] if every else [job]
    model = next(iter(target.models()), "policy")
    done = [one for one in letters if one and scripts.run(target.client, scripts.requeue(target.keys, one, model))]
    if not every and not done:
        raise ConfigError(f"Job {job!r} is not buried; `penstock dead ls` lists those that are.")
    if as_json:
        print_json(done)
    else:
        say(f"{len(done)} jobs are queued again")


@workers_app.command("ls")
def workers_ls(
    run: RunArgument = None, redis: UrlOption = None, directory: FolderOption = DIRECTORY, as_json: JsonOption = False
) -> None:
    """Workers that are alive."""
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    rows = snapshot(target.client, target.keys)["workers"]
    columns = ["name", "host", "pid", "engine", "url", "version", "state", "held", "running", "slots", "tokens_per_s"]
    if as_json:
        print_json(rows)
        return
    _show_workers(rows, columns)


def _letter(entry: tuple[bytes, dict[bytes, bytes]]) -> dict[str, Any]:
    """A dead letter; what it lacks is '' or None, for the others are to be listed all the same."""
    texts = {name: name_shown(entry[1].get(name.encode(), b"")) for name in ("id", "reason", "worker", "detail")}
    counts = {name: name_shown(entry[1].get(name.encode(), b"")) for name in ("attempts", "crashes")}
    return {
        "job": texts["id"],
        "reason": texts["reason"],
        **{name: int(count) if re.fullmatch(r"[0-9]{1,18}", count) else None for name, count in counts.items()},
        "worker": texts["worker"],
        "buried_ms": int(entry[0].split(b"-")[0]),
        "detail": texts["detail"],
    }


def register(app: typer.Typer) -> None:
    """Hang these commands under ``penstock``."""
    from console.cli import payloads as payloads_cli

    payloads_cli.register(app)
    app.command()(status)
    app.command()(why)
    app.command()(audit)
    app.add_typer(jobs_app, name="jobs")
    app.add_typer(dead_app, name="dead")
    app.add_typer(workers_app, name="workers")
    from console.cli.engines import engines_app
    from console.cli.subs import subs_app

    app.add_typer(subs_app, name="subs")
    app.add_typer(engines_app, name="engines")
