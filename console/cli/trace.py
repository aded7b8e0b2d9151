"""``penstock trace``: show the events of a job, a sample, a prompt or a batch; or export those of a span of time."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import Answer
from penstock.console.cli.history import Run, check_new, writing
from penstock.console.details import detail_lines
from penstock.console.resources import clock
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError
from penstock.system.extras import check_installed

if TYPE_CHECKING:
    from penstock.console.read.stages import Asked, Sources


#: Seconds of a unit behind a number.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: Span written by default.
SPAN_S = 60.0


def trace(
    found: Run,
    answer: Answer,
    what: Annotated[
        str,
        typer.Argument(
            help="Job (DATASET/EPOCH/LINE), sample (.../K), prompt (DATASET/LINE) or batch (N, or SUB:N).",
        ),
    ] = "",
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write a span of time for ui.perfetto.dev.")
    ] = None,
    otlp: Annotated[
        str, typer.Option("--otlp", metavar="URL", help="Send a span of time to a collector of OpenTelemetry.")
    ] = "",
    since: Annotated[
        str,
        typer.Option(
            "--from", metavar="T", help="Beginning of the span of time: 2026-11-23T10:00:00Z, or Unix seconds."
        ),
    ] = "",
    until: Annotated[
        str, typer.Option("--to", metavar="T", help="End of the span; default: now, or the end of the run.")
    ] = "",
    last: Annotated[
        str, typer.Option("--last", metavar="TIME", help="Length of the span, counted back from its end: 60s, 5m, 2h.")
    ] = "",
) -> None:
    """Show the events of a job, its leases, and each sample's stages from prompt to step; or of a span of time."""
    if [bool(what), perfetto is not None, bool(otlp)].count(True) != 1:
        raise ConfigError(
            "Name what is to be traced, or give --perfetto FILE or --otlp URL for a span of time: one of them."
        )
    if what and (since or until or last):
        raise ConfigError("--from, --to and --last name a span of time, which --perfetto FILE writes: give that too.")
    if otlp:
        _send(found, otlp, (since, until, last), answer)
        return
    if perfetto is not None:
        check_new(perfetto)
        _write(found, perfetto, (since, until, last), answer)
        return
    from penstock.console.read.stages import asked_of

    asked = asked_of(what)
    events = _find(found, asked)
    if events is None:
        found = found.with_rest()
        events = _find(found, asked)
    if events is None:
        for problem in found.samples.problems:
            say(problem, err=True)
        forgotten = "" if found.samples.is_there else ", which has no history: it forgets samples once they are trained"
        raise ConfigError(
            f"Run {found.folder.name} knows nothing of {what!r}{forgotten}; `penstock samples ls` and "
            "`penstock jobs ls` list what there is."
        )
    if answer.as_json:
        print_json(events if asked.job or asked.batch is not None else events["jobs"])
    else:
        problems = events.pop("problems", ())
        say("\n".join(detail_lines(events)))
        for problem in problems:
            say(problem, err=True)
    found.tell_problems()


def _sources(found: Run) -> "Sources":
    from penstock.console.read.stages import sources_of

    return sources_of(found.folder, found.samples, found.live)


def _find(found: Run, asked: "Asked") -> dict[str, Any] | None:
    from penstock.console.read.trace import find_trace

    return find_trace(_sources(found), asked)[1]


def _send(found: Run, url: str, asked: tuple[str, str, str], answer: Answer) -> None:
    from penstock.console.read.timeline import latest_s, rows_within

    check_installed("opentelemetry.exporter.otlp.proto.http", "--otlp")
    from penstock.console.read.otlp import send_spans

    sources = _sources(found)
    from_s, to_s = _span(*asked, end_s=found.end_s(latest_s(sources)))
    problems: list[str] = []
    count = send_spans(url, found.folder.name, rows_within(sources, from_s, to_s, problems))
    span = {"from": clock(from_s), "to": clock(to_s)}
    answer.tell(f"{count} spans of {span['from']} to {span['to']} were sent.", {"spans": count, **span})
    for problem in problems:
        say(problem, err=True)
    found.tell_problems()


def _write(found: Run, path: Path, asked: tuple[str, str, str], answer: Answer) -> None:
    from penstock.console.read.timeline import latest_s, tracks, write_perfetto

    sources = _sources(found)
    from_s, to_s = _span(*asked, end_s=found.end_s(latest_s(sources)))
    problems: list[str] = []
    lines, waits = tracks(sources, from_s, to_s, problems)
    span = {"from": clock(from_s), "to": clock(to_s)}
    with writing(path):
        count = write_perfetto(path, lines, waits, {"run": found.folder.name, **span})
    words = f"{path}: {count} events of {span['from']} to {span['to']}, for https://ui.perfetto.dev"
    answer.tell(words, {"path": str(path), "events": count, **span})
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
    raise ConfigError(f"invalid {option} {text!r}: give a time such as 2026-11-23T10:00:00Z, or Unix seconds.")


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
        raise ConfigError(f"invalid --last {text!r}: give a number followed by s, m, h or d, such as 60s.")
    return seconds
