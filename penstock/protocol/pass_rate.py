"""Shares of right answers in the latest groups of a prompt: a byte for each group, in strings of many prompts.

The verb ``keep`` writes it, with a mark in the group; ``admit`` decides by it. This module repeats their computation
for views, and for the tests that compare both.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.records.keys import Keys
from penstock.redis.commands import Client, scan_keys

#: Latest groups of a prompt that are kept, and prompts of one string (``lua/admission.lua`` has both).
MOST_GROUPS, CHUNK = 8, 4096
#: Byte of a group in which no answer, or every one, is right; other shares are between them.
_NONE, _ALL = 1, 255
#: Steps in which the share of a group is counted.
PARTS = _ALL - _NONE


def share_byte(right: int, answers: int) -> int:
    """Return the share of a group's answers that are right as a byte: in 254ths, and only 0 and 1 as 0 and 1.

    0: the group has no answer, so nothing is counted.
    """
    if answers < 1:
        return 0
    if right in (0, answers):
        return _ALL if right else _NONE
    return min(max(_NONE + round(PARTS * right / answers), _NONE + 1), _ALL - 1)


def share_of(byte: int) -> float:
    """Return the share of a byte, from 0 to 1."""
    return (byte - _NONE) / PARTS


@dataclass(frozen=True, slots=True)
class Skip:
    """When a prompt is skipped: it has ``groups`` latest groups, and these are almost all right, or almost all wrong.

    Args:
        easy: skipped as easy from this share on; None: never.
        hard: skipped as hard up to this share; None: never.
    """

    groups: int
    easy: float | None = None
    hard: float | None = None

    @property
    def _bounds(self) -> tuple[float, float]:
        """Bounds (hard at most, easy at least). Shares are rounded: half a step off, except 0 and 1."""
        hard, easy = (None if one is None else one * PARTS for one in (self.hard, self.easy))
        return (
            -1.0 if hard is None else hard + 0.5 * (hard > 0),
            PARTS + 1.0 if easy is None else easy - 0.5 * (easy < PARTS),
        )

    def __str__(self) -> str:
        """Return the rule as an argument of ``admit``."""
        hard, easy = self._bounds
        return f"{self.groups},{hard!r},{easy!r}"

    def reason(self, latest: Sequence[float]) -> str:
        """Return ``hard``, ``easy``, or '' if a prompt with these shares, the latest first, is not skipped."""
        if len(latest) < self.groups:
            return ""
        parts = sum(round(share * PARTS) for share in latest[: self.groups])
        hard, easy = self._bounds
        if parts <= hard * self.groups:
            return "hard"
        return "easy" if parts >= easy * self.groups else ""


@dataclass(frozen=True, slots=True)
class PromptRate:
    """Shares of right answers in the latest groups of one prompt."""

    dataset: str
    #: Its number in the source, from 0, as in job ids.
    index: int
    #: Share of right answers of each group, from 0 to 1, the latest first.
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)


def read_prompt_rate(client: Client, keys: Keys, dataset: str, index: int) -> PromptRate | None:
    """Read the shares of one prompt; None if no group of it was counted. Blocks for a round trip."""
    at = index % CHUNK * MOST_GROUPS
    found = client.getrange(keys.rates(dataset, index // CHUNK), at, at + MOST_GROUPS - 1)
    return next(iter(_prompts(dataset, index, found)), None)


def read_rates(client: Client, keys: Keys) -> Iterator[PromptRate]:
    """Yield the shares of all prompts that have any, by dataset and number. Blocks as ``read_chunks``."""
    for dataset, first, data in read_chunks(client, keys):
        yield from _prompts(dataset, first, data)


def read_chunks(client: Client, keys: Keys) -> Iterator[tuple[str, int, bytes]]:
    """Yield dataset, number of the first prompt and bytes of each string. Blocks for a SCAN, and per 4,096 prompts.

    Keys with invalid names are skipped.
    """
    for dataset, chunk in sorted(set(_chunks(keys, scan_keys(client, keys.of("rates:"))))):
        yield dataset, chunk * CHUNK, client.getrange(keys.rates(dataset, chunk), 0, CHUNK * MOST_GROUPS - 1)


def _chunks(keys: Keys, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        dataset, _, number = name.removeprefix(keys.of("rates:")).rpartition("/")
        if dataset and number.isascii() and number.isdigit() and len(number) < 16:
            yield dataset, int(number)


def _prompts(dataset: str, first: int, data: bytes) -> Iterator[PromptRate]:
    for at in range(0, len(data), MOST_GROUPS):
        shares = tuple(share_of(byte) for byte in data[at : at + MOST_GROUPS] if byte)
        if shares:
            yield PromptRate(dataset, first + at // MOST_GROUPS, shares)
