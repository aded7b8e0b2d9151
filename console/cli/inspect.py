"""Commands that inspect a complete run: status, why, audit. Each prints words, or --json."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.console.cli import doctor, top
from penstock.console.cli import payloads as payloads_cli
from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from penstock.console.cli.engines import engines_app
from penstock.console.cli.history.evals import eval_app
from penstock.console.cli.history.export import export
from penstock.console.cli.history.samples import samples_app
from penstock.console.cli.history.trace import trace
from penstock.console.cli.nouns import lanes
from penstock.console.cli.nouns.data import data_app
from penstock.console.cli.nouns.dead import dead_app
from penstock.console.cli.nouns.jobs import jobs_app
from penstock.console.cli.nouns.rewards import reward_app
from penstock.console.cli.nouns.workers import show_workers, trainers_app, weights_app, workers_app
from penstock.console.cli.subs import subs_app
from penstock.console.cli.target import Target
from penstock.console.read.tokens import goodput_line
from penstock.console.terminal import print_json, say, table

_NOUNS = {
    "jobs": jobs_app,
    "data": data_app,
    "dead": dead_app,
    "workers": workers_app,
    "trainers": trainers_app,
    "subs": subs_app,
    "weights": weights_app,
    "engines": engines_app,
    "samples": samples_app,
    "eval": eval_app,
    "reward": reward_app,
}


def status(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: seconds between two looks.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show queues, workers, trainers, subscriptions and waits of a run."""
    from penstock.console.cli.watch import watch as watch_
    from penstock.console.read.health import sync_trouble
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)

    def look() -> None:
        state = snapshot(target.client, target.keys) | {"sync_trouble": sync_trouble(target.client)}
        (print_json if as_json else _show_status)(state)

    if watch:
        watch_(target, every, look)
    look()


def _show_status(state: Mapping[str, Any]) -> None:
    from penstock.console.read.lanes import ready_line
    from penstock.console.read.trainers import head_line

    say(f"run {state['run']}: {head_line(state)}")
    ready = state["ready_lanes"]
    lanes = [{"lane": lane, **counts, "ready": ready[lane]} for lane, counts in state["lanes"].items()]
    table(lanes, ["lane", "queued", "leased", "ready"], "queues")
    say(f"delayed {state['delayed']}, dead {state['dead']}, {ready_line(state)}")
    for line in (
        passed_line(state["counters"]),
        skipped_line(state["counters"]),
        rollback_line(state["counters"]),
        goodput_line(state),
        state["sync_trouble"],
    ):
        if line:
            say(line)
    columns = ["name", "engine", "version", "state", "held", "running", "slots", "tokens_per_s", "age_s"]
    show_workers(state["workers"], columns)
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
    """Show what each part waits for, followed to the part, person or cause that ends it; longest wait first."""
    from penstock.console.read.why import chains, paused_lanes
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    state = snapshot(target.client, target.keys)
    found = chains(state)
    if as_json:
        print_json([chain.to_map() for chain in found])
        return
    if not found:
        say("No part is waiting.")
    for chain in found:
        for line in chain.lines():
            say(line)
    ends = {chain.end for chain in found}
    for line in [*(str(one) for one in paused_lanes(state) if one not in ends), *ledger_lines(state["subs"])]:
        say(line)


def ledger_lines(subs: list[dict[str, Any]]) -> list[str]:
    """Return a line per subscription with disposals: number of groups, by reason, largest first; or unreadable."""
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
        lines.append(f"subscription {sub['name']} disposed of {sum(drops.values())} groups: {words or 'none'}{raised}")
    return lines


def passed_line(counters: dict[str, int]) -> str:
    """Return the number of training data lines that the producers skipped, by dataset; '' if there are none."""
    passed = {name.partition(":")[2]: count for name, count in counters.items() if name.startswith("passed_lines:")}
    words = ", ".join(f"{name} {count}" for name, count in sorted(passed.items()))
    return f"lines passed over, by dataset: {words}" if words else ""


def skipped_line(counters: dict[str, int]) -> str:
    """Return the number of prompts that curricula skipped, by dataset; '' if there are none."""
    skipped: dict[str, list[str]] = {}
    for name, count in sorted(counters.items()):
        kind, _, dataset = name.partition(":")
        if kind in ("skipped_easy", "skipped_hard"):
            skipped.setdefault(dataset, []).append(f"{count} {kind.removeprefix('skipped_')}")
    words = ", ".join(f"{name} {' and '.join(counts)}" for name, counts in skipped.items())
    return f"prompts skipped by a curriculum, of all epochs: {words} (`penstock data ls`)" if words else ""


def rollback_line(counters: dict[str, int]) -> str:
    """Return what Redis lost after it had acknowledged it, as far as known; '' if it lost nothing."""
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
    from penstock.console.progress import Steps
    from penstock.console.read.lanes import ready_line
    from penstock.protocol.audit import audit as recount
    from penstock.protocol.snapshot import snapshot

    target = Target(run, redis, directory)
    with Steps("recounting groups", hidden=as_json) as steps:
        report = recount(target.client, target.keys, lambda done, total: steps.at(done, total=total))
    state = snapshot(target.client, target.keys)
    if as_json:
        print_json({**asdict(report), "ready_lanes": state["ready_lanes"], "ok": report.ok})
    else:
        counts = ", ".join(f"{name} {value}" for name, value in asdict(report.recount).items())
        say(f"{counts}; {report.groups} live groups")
        for difference in report.differences:
            say(f"  {difference}")
        for line in (ready_line(state), goodput_line(state), rollback_line(state["counters"])):
            if line:
                say(line)
        say("ok" if report.ok else f"not ok: lost {report.lost}, duplicated {report.duplicated}")
    if not report.ok:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add these commands, and those of all nouns, to ``penstock``."""
    app.command()(status)
    app.command()(why)
    app.command()(audit)
    for verbs in (payloads_cli, lanes, doctor, top):
        verbs.register(app)
    app.command()(export)
    app.command()(trace)
    for name, noun in _NOUNS.items():
        app.add_typer(noun, name=name)
