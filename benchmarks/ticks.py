"""Tokens by the millisecond: one process counts them as they come, another reads them; and what of them was lost.

    ──── before: the rate ────┬──────── event ────────┬── behind it ──
     bins │    │    │    │    │    │    │    │    │    │    │    │
                                   pauses ▒▒▒▒▒

What was lost is that rate for as long as the event and the time behind it took, less the tokens that came in it. What
was lost in the pauses of the engine and what was lost outside of them add up to it.
"""

import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.001
_HEAD = struct.Struct("d")
_COUNT_BYTES = 4


class Ticks:
    """A counter of tokens for each millisecond from the making of its file on, in memory that processes share."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        self._whole = memoryview(self._memory)
        self._counts = self._whole[_HEAD.size :].cast("I")
        #: When its first millisecond began, on the monotonic clock.
        (self.began_s,) = _HEAD.unpack_from(self._memory)

    @classmethod
    def make(cls, file: Path, seconds: float) -> "Ticks":
        """A file of zeros for so many seconds."""
        with file.open("wb") as made:
            made.write(_HEAD.pack(time.monotonic()))
            made.truncate(_HEAD.size + _COUNT_BYTES * int(seconds / TICK_S))
        return cls(file)

    def add(self, tokens: int) -> None:
        """So many tokens came now. IndexError once its seconds are over."""
        self._counts[self.at(time.monotonic())] += tokens

    def at(self, when_s: float) -> int:
        """Which millisecond that is."""
        return int((when_s - self.began_s) / TICK_S)

    def between(self, first: int, end: int) -> list[int]:
        """Tokens of the milliseconds ``first`` to ``end``, that one left out."""
        return self._counts[first:end].tolist()

    def total(self) -> int:
        """All tokens so far."""
        return sum(self._counts[: self.at(time.monotonic()) + 1])

    def close(self) -> None:
        """Nothing may be counted or read any more."""
        self._counts.release()
        self._whole.release()
        self._memory.close()


@dataclass(frozen=True, slots=True)
class Account:
    """What an event cost, against the rate before it."""

    #: Tokens per second before it.
    rate: float
    #: Seconds of the event and of the time behind it that was looked at, and tokens that came in them.
    seconds: float
    tokens: int
    #: Seconds of them in which the engine was held still.
    pause_s: float
    #: Tokens that did not come; below 0 where more came.
    lost_in_pause: float
    lost_outside: float

    @property
    def lost(self) -> float:
        return self.lost_in_pause + self.lost_outside


def account(counts: Sequence[int], event: int, pauses: Sequence[tuple[int, int]]) -> Account:
    """Reckon an event up.

    Args:
        counts: [T] tokens of each millisecond.
        event: where in them it begins; what is before it gives the rate.
        pauses: first millisecond of each pause and the one behind it; what lies outside of ``counts`` or is in two of
            them counts once at most.
    """
    if not 0 < event < len(counts):
        raise ValueError(f"an event at {event} of {len(counts)} milliseconds has nothing before it, or behind it.")
    paused = {tick for first, end in pauses for tick in range(max(first, event), min(end, len(counts)))}
    rate = sum(counts[:event]) / (event * TICK_S)
    tokens = sum(counts[event:])
    in_pause = sum(counts[tick] for tick in paused)
    seconds, pause_s = (len(counts) - event) * TICK_S, len(paused) * TICK_S
    return Account(
        rate=rate,
        seconds=seconds,
        tokens=tokens,
        pause_s=pause_s,
        lost_in_pause=rate * pause_s - in_pause,
        lost_outside=rate * (seconds - pause_s) - (tokens - in_pause),
    )


def in_bins(counts: Sequence[int], event: int, size: int) -> tuple[list[int], list[int]]:
    """Tokens of bins of ``size`` milliseconds, before the event and from it on.

    A bin begins with the event; one that ``counts`` does not have the whole of, at either end, is left out.
    """
    sums = [sum(counts[first : first + size]) for first in range(event % size, len(counts) - size + 1, size)]
    return sums[: event // size], sums[event // size :]


def mean_shares(runs: Sequence[tuple[Sequence[int], float]]) -> list[float]:
    """Means over several events of their bins, each over what its rate would have brought in a bin.

    Args:
        runs: bins from the event on, and tokens that a bin had before it. As far as the shortest reaches.
    """
    return [sum(bins[i] / usual for bins, usual in runs) / len(runs) for i in range(min(len(bins) for bins, _ in runs))]


_LEVELS = " ▁▂▃▄▅▆▇█"


def drawn(shares: Sequence[float], most: float = 1.25) -> str:
    """A picture of bins, one sign each: empty for none, full for ``most`` times the rate before."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[max(0, min(top, round(share / most * top)))] for share in shares)
