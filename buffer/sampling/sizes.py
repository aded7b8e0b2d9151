"""Sizes of batches: complete groups, counted as groups, samples or tokens."""

from collections.abc import Iterable

from penstock.buffer.group import Group
from penstock.config.subscription import MAX_BATCH_SAMPLES, Unit


class TooLarge(Exception):
    """The batch would have more samples than a manifest can hold."""


def amount(group: Group, unit: Unit) -> int:
    """Return the size of one group in this unit."""
    return {Unit.GROUPS: 1, Unit.SAMPLES: group.n, Unit.TOKENS: group.tokens}[unit]


def take(groups: Iterable[Group], *, unit: Unit, size: int, multiple: int = 1) -> list[Group]:
    """Take the fewest groups in this order with ``size``, then cut back to a ``multiple`` of samples.

    Like slime's dynamic global batch (n // dp * dp), but the rest carries over as complete groups (T10). If no
    shorter batch is a multiple, a longer one is taken. [] if there are too few groups. Raises TooLarge.
    """
    taken: list[Group] = []
    total = samples = fits = 0
    for group in groups:
        taken.append(group)
        total += amount(group, unit)
        samples += group.n
        if samples > MAX_BATCH_SAMPLES:
            raise TooLarge
        if samples % multiple == 0:
            fits = len(taken)
        if total >= size and fits:
            return taken[:fits]
    return []
