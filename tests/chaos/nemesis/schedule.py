"""Which faults strike a run, and when: drawn by a seed, or read from the log of a run before.

Each act stands in the log, synced to the disk, before it is done: what a run died of can be done again. A log is JSON
lines: first what was asked for, then for each act its record before it and its end after it. A torn last line is what a
kill leaves.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import orjson

from tests.chaos.nemesis.act import Act, Facts, Ground, Kind
from tests.chaos.nemesis.counting import Strike

#: Longest time after a moment, in seconds; half of the acts come at once.
AFTER_S = 0.8
#: Share of acts that do not wait for the run to recover from the one before. They do not count, but find much.
CHAINED = 0.1
#: Share of acts that are keyed to a moment, of those that can be.
KEYED = 0.6


class Schedule:
    """Acts by seed, as many as are asked for.

    Kinds that were struck less often come first by their weight, so that all get their turn in a short run too.
    """

    def __init__(self, seed: int, kinds: Mapping[str, Kind]) -> None:
        self._seed = seed
        self._kinds = kinds
        self._drawn: Counter[str] = Counter()
        self._number = 0

    def next(self, possible: Collection[str]) -> Act | None:
        """The next act, of one of these kinds; None where none of them is possible."""
        names = sorted(set(self._kinds) & set(possible))
        if not names:
            return None
        self._number += 1
        rng = Random(f"{self._seed}/{self._number}")
        weights = [self._kinds[name].weight / (1 + self._drawn[name]) ** 2 for name in names]
        (name,) = rng.choices(names, weights)
        self._drawn[name] += 1
        moments = self._kinds[name].moments
        keyed = bool(moments) and rng.random() < KEYED
        return Act(
            self._number,
            name,
            moment=rng.choice(moments) if keyed else "",
            after_s=round(rng.random() * AFTER_S, 3) if rng.random() < 0.5 else 0.0,
            chained=self._number > 1 and rng.random() < CHAINED,
        )

    def facts(self, act: Act, ground: Ground) -> Act | None:
        """``act`` with its target; None where there is nothing to do it to any more."""
        facts = self._kinds[act.kind].choose(ground, Random(f"{self._seed}/{act.number}/facts"))
        return None if facts is None else replace(act, facts=facts)


class Replay:
    """The acts of a log, in their order."""

    def __init__(self, path: Path) -> None:
        self._acts = iter(acts_of(path))

    def next(self, possible: Collection[str]) -> Act | None:
        """The next act, whatever is possible now; None at the end."""
        return next(self._acts, None)

    def facts(self, act: Act, ground: Ground) -> Act | None:
        """As it stands in the log."""
        return act


class Log:
    """Acts and what became of them. Raises OSError where the disk takes no more."""

    def __init__(self, path: Path, asked: Facts) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write({"asked": asked})

    def begin(self, act: Act) -> None:
        """``act`` is about to be done."""
        self._write({"act": asdict(act), "mono": time.monotonic_ns(), "wall": time.time_ns()})

    def end(self, strike: Strike) -> None:
        """What became of it."""
        self._write({"end": asdict(strike)})

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: dict[str, Any]) -> None:
        line = memoryview(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)


def acts_of(path: Path) -> list[Act]:
    """The acts that a log holds. Raises ValueError where a line other than the last is torn."""
    return [Act(**record["act"]) for record in _records(path) if "act" in record]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield orjson.loads(line)
        except ValueError as exc:
            raise ValueError(f"Line {number} of {path} is torn, and others follow it: this is no log.") from exc
