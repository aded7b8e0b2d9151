"""What all runs together came to, as Markdown: faults by kind against their targets, and seconds to recover."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.night.again import cleared_by, name_of
from tests.chaos.night.targets import TARGETS, net_share, struck, target_of
from tests.chaos.places import ROOT

#: The page that tells how long a run takes to recover, and between what the table stands there.
PAGE = ROOT / "docs" / "operations.md"
BEGIN = "<!-- Made by `python -m tests.chaos.night --write-docs`. -->\n"
END = "<!-- End of what is made. -->\n"
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


def section(rows: Rows) -> str:
    """The part of the page that is made: how long it takes to recover from each kind that was struck."""
    times = recoveries(rows)
    lines = ["| fault | strikes | p50 (s) | p99 (s) |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {len(found)} | {' | '.join(quantiles(found))} |" for name, found in sorted(times.items())]
    return f"{BEGIN}\n{summary(rows)}\n\n" + "\n".join(lines) + f"\n\n{END}"


def write(rows: Rows, page: Path = PAGE) -> None:
    """Put the section into the page. Raises ValueError where the page has no place for it."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{page} has no place for the table: write {BEGIN.strip()} and {END.strip()} where it belongs."
        )
    page.write_text(before + section(rows) + after, encoding="utf-8")
