"""Summarize runs as Markdown: faults by kind and workload, seconds to recover, and the seeds that found something."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tests.chaos.night.again import cleared_by, name_of
from tests.chaos.night.targets import TARGETS, net_share, struck, target_of
from tests.chaos.places import RESULTS

#: The summary that the repository has of all runs; their rows stay on the machine that ran them.
SUMMARY = RESULTS / "summary.md"
#: Of fewer strikes the longest is told as the 99th percentile; up to a hundred of them it is little less than that.
FEWEST = 5

Rows = Sequence[dict[str, Any]]


def report(rows: Rows) -> str:
    """All there is to say of the runs so far."""
    counted, done = struck(rows), struck(rows, "faults")
    short = [name for name, target in TARGETS.items() if counted[name] < target]
    lines = [summary(rows), f"Short of their target: {len(short)} of {len(TARGETS)}.", ""]
    lines += ["| fault | done | count | target | recovery p50 (s) | p99 (s) |", "|---|---|---|---|---|---|"]
    times = recoveries(rows)
    for name in sorted({*TARGETS, *done}):
        half, most = quantiles(times.get(name, []))
        lines.append(f"| `{name}` | {done[name]} | {counted[name]} | {TARGETS.get(name, '-')} | {half} | {most} |")
    return "\n".join([*lines, "", *_found(rows)])


def summary(rows: Rows) -> str:
    """Runs, hours and faults in a sentence."""
    counted, hours = struck(rows), sum(row["wall_s"] for row in rows) / 3600
    versions = " and ".join(sorted({row["redis"] for row in rows}))
    share = f", the network's {net_share(counted):.0%} of them" if counted else ""
    return (
        f"{len(rows):,} runs of {len({row['workload'] for row in rows})} workloads in {hours:.1f} hours, "
        f"Redis {versions or '-'}: {sum(struck(rows, 'faults').values()):,} faults, "
        f"{sum(counted.values()):,} of which count{share}."
    )


def _found(rows: Rows) -> Iterator[str]:
    found, cleared = [row for row in rows if row["violations"]], cleared_by(rows)
    yield f"Runs in which something was found: {len(found) or 'none'}."
    for row in found:
        about = ", ".join(f"{name} {times}" for name, times in row["violations"].items())
        later = cleared.get(name_of(row))
        mended = f"; made again at {later['commit']}: nothing" if later else ""
        yield f"- {row['workload']} seed {row['seed']}, Redis {row['redis']}, {row['commit']}: {about}{mended}"


def recoveries(rows: Rows) -> dict[str, list[float]]:
    """Target -> seconds to the next batch that was committed, of each strike that counts."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for kind, seconds in row["recovery_s"].items():
            found[target_of(row["workload"], kind)] += seconds
    return found


def quantiles(seconds: list[float]) -> tuple[str, str]:
    """p50 and p99 in words; of few strikes the longest stands for the 99th percentile."""
    if not seconds:
        return "-", "-"
    most = max(seconds) if len(seconds) < FEWEST else statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return f"{statistics.median(seconds):.1f}", f"{most:.1f}"


def page(rows: Rows) -> str:
    """Return the summary: seconds to recover by fault, faults by workload, and runs in which something was found."""
    times = recoveries(rows)
    lines = ["# Runs under faults", "", f"{summary(rows)} Written by `python -m tests.chaos.night --summarize`.", ""]
    lines += ["| fault | strikes | p50 (s) | p99 (s) |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {len(found)} | {' | '.join(quantiles(found))} |" for name, found in sorted(times.items())]
    lines += ["", "| workload | runs | faults that count |", "|---|---|---|"]
    for workload in sorted({row["workload"] for row in rows}):
        own = [row for row in rows if row["workload"] == workload]
        faults = ", ".join(f"{name} {times}" for name, times in sorted(struck(own).items()))
        lines.append(f"| `{workload}` | {len(own)} | {faults} |")
    return "\n".join([*lines, "", *_found(rows), ""])
