"""The split of a batch over ranks: seconds for many samples, and how uneven the ranks' tokens are.

    python -m benchmarks.balance --json FILE

Lengths are log-normal (median 2,048 tokens, sigma 1, at most 32,768): a few ranks would hold the long ones. Imbalance
is the most loaded rank's tokens over the mean, minus 1. Dealt out in turn is what it is without balancing.
"""

import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, median, versions
from penstock.protocol import partition
from penstock.records.manifest import Row

COLUMNS = {
    "samples": "samples",
    "ranks": "ranks",
    "seconds": "seconds",
    "imbalance": "imbalance",
    "karmarkar_karp": "before swaps",
    "dealt_out": "dealt out",
}
MEDIAN, SIGMA, MOST = 2048, 1.0, 32768
ROUNDS = 3


def lengths_of(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(MOST, max(1, int(MEDIAN * rng.lognormvariate(0, SIGMA)))) for _ in range(count)]


def imbalance(lengths: list[int], parts: list[list[int]]) -> float:
    sums = [sum(lengths[i] for i in part) for part in parts]
    return max(sums) * len(sums) / sum(sums) - 1


def measure(samples: int, ranks: int) -> dict[str, Any]:
    """Medians over a few draws of lengths."""
    seconds, after, before, dealt = [], [], [], []
    for seed in range(ROUNDS):
        lengths = lengths_of(samples, seed)
        rows = [Row(f"b/0/{i}", 0, "", "", 0, 0, n, 0, 0, 0, 0, 0, 0, 0.0, "completed") for i, n in enumerate(lengths)]
        began = time.perf_counter()
        parts = partition.split(rows, ranks, seed)
        seconds.append(time.perf_counter() - began)
        after.append(imbalance(lengths, parts))
        before.append(imbalance(lengths, partition.karmarkar_karp(lengths, ranks)))
        dealt.append(imbalance(lengths, partition.split(rows, ranks, seed, "strided")))
    return {
        "samples": samples,
        "ranks": ranks,
        "seconds": median(seconds),
        "imbalance": median(after),
        "karmarkar_karp": median(before),
        "dealt_out": median(dealt),
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Seconds and imbalance of the split of 10^3 and 10^4 samples over 8, 64 and 128 ranks."""
    rows = [measure(samples, ranks) for samples in (1_000, 10_000) for ranks in (8, 64, 128)]
    largest = [row for row in rows if row["samples"] == 10_000]
    Report(
        title=f"splitting samples over ranks by length; median of {ROUNDS} draws",
        columns=COLUMNS,
        rows=rows,
        keys={
            "seconds": max(row["seconds"] for row in largest),
            "imbalance": max(row["imbalance"] for row in largest),
        },
        versions=versions(),
    ).finish(json_file)


if __name__ == "__main__":
    execute(main)
