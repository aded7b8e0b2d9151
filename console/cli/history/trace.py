"""``penstock trace``: show the events of a job, a sample, a prompt or a batch; or of a span of time, for Perfetto."""

import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption, told
from penstock.console.cli.history.export import check_new, writing
from penstock.console.cli.history.filters import Run, open_run
from penstock.console.cli.history.samples import clock, troubles
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.console.read.trace.sources import Asked, Sources

#: Seconds of a unit behind a number.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: Span written by default.
SPAN_S = 60.0
_JOB_COLUMNS = ("job", "lane", "samples", "reward_mean", "oldest", "newest", "tries", "took_s", "workers", "fate")


def trace(
    what: Annotated[
        str,
        typer.Argument(
            help="Job (DATASET/EPOCH/LINE), sample (.../K), prompt (DATASET/LINE) or batch (N, or SUB:N).",
            autocompletion=completion.samples,
        ),
    ] = "",
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write a span of time for ui.perfetto.dev.")
    ] = None,
    since: Annotated[
        str, typer.Option("--from", metavar="T", help="Its beginning: 2026-11-23T10:00:00Z, or Unix seconds.")
    ] = "",
    until: Annotated[str, typer.Option("--to", metavar="T", help="Its end; default: now, or the end of the run.")] = "",
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="Its length up to the end: 60s, 5m, 2h.")] = "",
) -> None:
    """Show the events of a job, its leases, and each sample's stages from prompt to step; or of a span of time."""
    if bool(what) == (perfetto is not None):
        raise ConfigError("Name what is to be traced, or give --perfetto FILE for a span of time: one of them.")
    if perfetto is None and (since or until or last):
        raise ConfigError("--from, --to and --last name a span of time, which --perfetto FILE writes: give that too.")
    if perfetto is not None:
        check_new(perfetto)
        _write(open_run(run, redis, directory), perfetto, (since, until, last), as_json)
        return
    from penstock.console.read.trace.sources import asked_of

    asked = asked_of(what)
    found = open_run(run, redis, directory)
    answer = _find(found, _sources(found), asked)
    if answer is None:
        for problem in found.samples.problems:
            say(problem, err=True)
        raise ConfigError(
            f"Run {found.folder.name} knows nothing of {what!r}; `penstock samples ls` and `penstock jobs ls` list "
            "what there is."
        )
    if as_json:
        print_json(answer)
    elif asked.job:
        _say_job(answer)
    elif asked.batch is not None:
        _say_batch(answer)
    else:
        table([_cells(one) for one in answer], _JOB_COLUMNS, f"jobs that asked {what}")
    found.tell_problems()


def _sources(found: Run) -> "Sources":
    from penstock.console.read.trace.sources import sources_of

    return sources_of(found.folder, found.samples, found.live)


def _find(found: Run, sources: "Sources", asked: "Asked") -> Any:
    from penstock.console.read.trace.batch import trace_batch, trace_prompt
    from penstock.console.read.trace.job import trace_job

    if asked.batch is not None:
        return trace_batch(sources, asked)
    if not asked.job:
        return trace_prompt(sources, asked) or None
    return trace_job(sources, asked.job, asked.sample)


def _say_job(job: dict[str, Any]) -> None:
    say(f"job {job['job']}: {job['state']}, lane {job['lane']}, {troubles(job['failed_tries'], job['crashes'])}")
    if job["prompt"]:
        from penstock.console.cli.history.samples import excerpt

        say(f"prompt: {excerpt(job['prompt'])}")
    table([_try(one) for one in job["tries"]], ["try", "worker", "lane", "leased", "held_s", "end"], "tries")
    table([_sample(one) for one in job["samples"]], _SAMPLE_COLUMNS, "samples")
    columns = ["subscription", "batch", "version", "step", "samples", "staleness", "loss_tokens", "cut", "trained"]
    table([_clocks(one, "cut", "trained") for one in job["batches"]], columns, "batches")
    first = job["events"][0]["at_s"] if job["events"] else 0.0
    rows = [
        {"after_s": f"{one['at_s'] - first:.3f}", **{name: one[name] for name in ("event", "who", "what")}}
        for one in job["events"]
    ]
    table(rows, ["after_s", "event", "who", "what"], f"events since {clock(first)}" if first else "events")
    for problem in job["problems"]:
        say(problem, err=True)


_SAMPLE_COLUMNS = ("sample", "try", "worker", "versions", "tokens", "reward", "fate", "longest")


def _try(one: dict[str, Any]) -> dict[str, Any]:
    held = f"{one['ended_s'] - one['leased_s']:.3f}" if one["ended_s"] else "-"
    return {
        "try": one["number"],
        "leased": clock(one["leased_s"]),
        "held_s": held,
        **one,
        "end": one["end"] or "under way",
    }


def _sample(one: dict[str, Any]) -> dict[str, Any]:
    versions = str(one["newest"]) if one["oldest"] == one["newest"] else f"{one['oldest']}-{one['newest']}"
    stage = max(one["stages"], key=lambda stage: stage["end_s"] - stage["begin_s"], default=None)
    longest = f"{stage['name']} {stage['end_s'] - stage['begin_s']:.3f} s" if stage else ""
    fate = one["fate"] or f"({one['reason']})"
    return {
        **one,
        "sample": one["id"],
        "versions": versions,
        "tokens": one["num_generated"],
        "fate": fate,
        "longest": longest,
    }


def _say_batch(batch: dict[str, Any]) -> None:
    step = "no step is known" if batch["step"] is None else f"step {batch['step']}"
    say(f"batch {batch['batch']} of {batch['subscription']}: version {batch['version']}, {step}")
    for name in ("cut", "trained"):
        if batch[f"{name}_s"]:
            say(f"{name}: {clock(batch[f'{name}_s'])}")
    if batch["step"] is not None:
        say(f"waited {batch['wait_s']:.3f} s, trained {batch['train_s']:.3f} s, published {batch['publish_s']:.3f} s")
    table([_cells(one) for one in batch["jobs"]], _JOB_COLUMNS, "jobs")
    for problem in batch["problems"]:
        say(problem, err=True)


def _cells(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "took_s": None if one["took_s"] is None else round(one["took_s"], 3)}


def _clocks(one: dict[str, Any], *names: str) -> dict[str, Any]:
    version = one["version"] if one["version"] >= 0 else None
    return {**one, "version": version, **{name: clock(at) if (at := one[f"{name}_s"]) else None for name in names}}


def _write(found: Run, path: Path, asked: tuple[str, str, str], as_json: bool) -> None:
    from penstock.console.read.trace.perfetto import write_perfetto
    from penstock.console.read.trace.tracks import latest_s, tracks

    sources = _sources(found)
    from_s, to_s = _span(*asked, end_s=time.time() if found.live else latest_s(sources))
    problems: list[str] = []
    lines, waits = tracks(sources, from_s, to_s, problems)
    span = {"from": clock(from_s), "to": clock(to_s)}
    with writing(path):
        count = write_perfetto(path, lines, waits, {"run": found.folder.name, **span})
    words = f"{path}: {count} events of {span['from']} to {span['to']}, for https://ui.perfetto.dev"
    told(words, {"path": str(path), "events": count, **span}, as_json)
    for problem in problems:
        say(problem, err=True)
    if not count:
        say("Nothing is known of that time.", err=True)
    found.tell_problems()


def _span(since: str, until: str, last: str, *, end_s: float) -> tuple[float, float]:
    """Return the span (Unix seconds); it ends at ``end_s`` by default. Raises ConfigError."""
    if since and last:
        raise ConfigError("--from and --last both say where the span begins: give one of them.")
    to_s = _time("--to", until) if until else end_s
    from_s = _time("--from", since) if since else to_s - (_length(last) if last else SPAN_S)
    if from_s >= to_s:
        raise ConfigError(
            f"The span ends at {clock(to_s)}, before it begins ({clock(from_s)}): correct --from or --to."
        )
    return from_s, to_s


def _time(option: str, text: str) -> float:
    """Parse a time to Unix seconds; without a zone it is UTC. Raises ConfigError."""
    for read in (float, _timestamp):
        with contextlib.suppress(ValueError, OverflowError):
            if 0 <= (found := read(text)) < 1e11:
                return found
    raise ConfigError(f"{option} {text!r} is no time: write 2026-11-23T10:00:00Z, or Unix seconds.")


def _timestamp(text: str) -> float:
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _length(text: str) -> float:
    """Parse a length of time to seconds. Raises ConfigError."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"--last {text!r} is no length of time: write a number and s, m, h or d, such as 60s.")
    return seconds
