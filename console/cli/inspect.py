"""Commands that inspect a complete run: status, why, audit. Each prints words, or --json."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.console.cli import doctor, nouns
from penstock.console.cli import payloads as payloads_cli
from penstock.console.cli.command import Answer, command
from penstock.console.cli.engines import engines_app
from penstock.console.cli.history import export
from penstock.console.cli.nouns import show_table
from penstock.console.cli.rewards import reward_app
from penstock.console.cli.samples import eval_app, samples_app
from penstock.console.cli.target import Target
from penstock.console.cli.trace import trace
from penstock.console.resources import LANES, SUBS, TRAINERS, VERIFIERS, WAITS, WORKERS
from penstock.console.terminal import flush, print_json, reader_left, say
from penstock.errors import ConfigError


def status(
    target: Target,
    answer: Answer,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: seconds between two looks.")] = 2.0,
) -> None:
    """Show queues, workers, trainers, subscriptions and waits of a run."""
    from redis.exceptions import RedisError
    from rich.console import Console

    from penstock.console.read.health import sync_trouble
    from penstock.protocol.snapshot import snapshot
    from penstock.redis.connect import translate

    console = Console()
    while True:
        try:
            state = snapshot(target.client, target.keys) | {"sync_trouble": sync_trouble(target.client)}
            if watch:
                console.clear()
            print_json(state) if answer.as_json else _show_status(target, state)
        except RedisError as exc:
            if not watch:
                raise
            say(str(translate(exc, target.url)), err=True)
        flush()
        if not watch or reader_left():
            return
        time.sleep(every)


def _show_status(target: Target, state: Mapping[str, Any]) -> None:
    from penstock.console.read.lanes import goodput_line, lane_rows, ready_line
    from penstock.console.read.parts import head_line, trainer_rows, worker_row

    say(f"run {state['run']}: {head_line(state)}")
    say(f"delayed {state['delayed']}, dead {state['dead']}, {ready_line(state)}")
    counters = state["counters"]
    say_lines(
        *(counter_line(counters, begin) for begin in _COUNTER_LINES), goodput_line(state),
        state["sync_trouble"], *ledger_lines(state["subs"]),
    )  # fmt: skip
    show_table(LANES, lane_rows(state))
    show_table(WORKERS, [worker_row(one) for one in state["workers"]])
    show_table(SUBS, SUBS.rows(target.client, target.keys))
    show_table(TRAINERS, trainer_rows(state))
    if not target.is_copy:  # else no part runs
        show_table(WAITS, state["waits"])
    if state["verifiers"] or state["checks"]:
        show_table(VERIFIERS, state["verifiers"])
        say(f"checks queued for verifiers: {state['checks']}")


def say_lines(*lines: str) -> None:
    """Print the lines that are not empty."""
    for line in filter(None, lines):
        say(line)


def why(target: Target, answer: Answer) -> None:
    """Show what each part waits for, followed to the part, person or cause that ends it; longest wait first."""
    from penstock.console.read.why import chains, paused_lanes
    from penstock.protocol.snapshot import snapshot

    state = snapshot(target.client, target.keys)
    found = [] if target.is_copy else chains(state)
    if answer.as_json:
        print_json([chain.to_map() for chain in found])
        return
    if not found:
        say("The run is over: no part runs." if target.is_copy else "No part is waiting.")
    ends = {chain.end for chain in found}
    paused = (str(one) for one in paused_lanes(state) if one not in ends)
    say_lines(*(line for chain in found for line in chain.lines()), *paused, *ledger_lines(state["subs"]))


def ledger_lines(subs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line per subscription with disposals: number of groups, by reason, largest first; or unreadable."""
    lines = []
    for sub in subs:
        if why := sub.get("unreadable"):
            lines.append(why)
            continue
        drops = {name[5:]: count for name, count in sub.items() if name.startswith("drop:")}
        if not drops and not sub.get("filter_raised"):
            continue
        ordered = sorted(drops.items(), key=lambda kv: (-kv[1], kv[0]))
        words = ", ".join(f"{reason} {count}" for reason, count in ordered)
        raised = f"; a filter raised on {sub['filter_raised']} groups" if sub.get("filter_raised") else ""
        lines.append(f"subscription {sub['name']} disposed of {sum(drops.values())} groups: {words or 'none'}{raised}")
    return lines


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


#: Prefix of counters -> the line about them.
_COUNTER_LINES = {
    "passed_lines:": "lines skipped, by dataset: {}",
    "skipped_easy:": "prompts skipped by a curriculum as too easy, of all epochs: {} (`penstock data ls`)",
    "skipped_hard:": "prompts skipped by a curriculum as too hard, of all epochs: {} (`penstock data ls`)",
    "rolled_back:": "Redis lost acknowledged writes {times} times (failover, power loss), at least: {}",
}


def counter_line(counters: Mapping[str, int], begin: str) -> str:
    """Return the line about the counters with this prefix, by what follows it; '' if there are none."""
    found = {name.removeprefix(begin): count for name, count in sorted(counters.items()) if name.startswith(begin)}
    times = counters.get(begin.rstrip(":"), 0)
    return _COUNTER_LINES[begin].format(_pairs(found), times=times) if found else ""


def rollback_line(counters: Mapping[str, int]) -> str:
    """Return what Redis lost after it had acknowledged it, as far as known; '' if it lost nothing."""
    return counter_line(counters, "rolled_back:")


def top(
    target: Target, every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0
) -> None:
    """Watch a run: workers, jobs, subscriptions and waits, with keys to sort and to open one. q quits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`penstock top` needs a terminal; `penstock status --watch` works in a pipe too.")
    from penstock.console.top import Top

    Top(target, every).run()


def audit(target: Target, answer: Answer) -> None:
    """Recount every job and group from the keys; exit code 1 on a difference."""
    from penstock.console.progress import Steps
    from penstock.console.read.lanes import goodput_line, ready_line
    from penstock.protocol.audit import audit as recount
    from penstock.protocol.snapshot import snapshot

    with Steps("recounting groups", hidden=answer.as_json) as steps:
        report = recount(target.client, target.keys, lambda done, total: steps.at(done, total=total))
    state = snapshot(target.client, target.keys)
    if answer.as_json:
        print_json({**asdict(report), "ready_lanes": state["ready_lanes"], "ok": report.ok})
    else:
        say(f"{_pairs(asdict(report.recount))}; {report.groups} live groups")
        say_lines(*(f"  {one}" for one in report.differences))
        say_lines(ready_line(state), goodput_line(state), rollback_line(state["counters"]))
        say("ok" if report.ok else f"not ok: lost {report.lost}, duplicated {report.duplicated}")
    if not report.ok:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add these commands, and those of all nouns, to ``penstock``."""
    for verb in (status, why, audit, top):
        command(app)(verb)
    nouns.register(app)
    payloads_cli.register(nouns.APPS["payloads"])
    doctor.register(app)
    command(app)(export)
    command(app)(trace)
    for name, group in {"engines": engines_app, "samples": samples_app, "eval": eval_app, "reward": reward_app}.items():
        app.add_typer(group, name=name)
