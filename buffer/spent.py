"""Groups that no subscription will use again: they retire when checkpoints are past their batches."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.buffer.group import Group

#: (subscription, batch) pairs: the last batch of each that contains a group.
_Batches = frozenset[tuple[str, int]]


@dataclass(slots=True)
class _Lot:
    """Groups that were used in the same batches, and so become durable together."""

    groups: dict[str, Group] = field(default_factory=dict)
    #: When the last of them was added (monotonic seconds).
    spent_at: float = 0.0


class Spent:
    """Used-up groups by their batches, so that a check costs as much as there are batches."""

    def __init__(self) -> None:
        self._lots: dict[_Batches, _Lot] = {}
        self._lot_of: dict[str, _Batches] = {}

    def __len__(self) -> int:
        return len(self._lot_of)

    def clear(self) -> None:
        self._lots.clear()
        self._lot_of.clear()

    def add(self, group: Group) -> None:
        """Add a group that will not be used again; adding it once more updates its batches."""
        self.discard(group)
        batches = frozenset(group.batches.items())
        lot = self._lots.setdefault(batches, _Lot())
        lot.groups[group.job] = group
        lot.spent_at = time.monotonic()
        self._lot_of[group.job] = batches

    def discard(self, group: Group) -> None:
        batches = self._lot_of.pop(group.job, None)
        if batches is None:
            return
        lot = self._lots[batches]
        del lot.groups[group.job]
        if not lot.groups:
            del self._lots[batches]

    def durable(self, ckpt: Mapping[str, int]) -> list[Group]:
        """Return the groups that no restored trainer can need: every batch with them is covered by a checkpoint."""
        return _flat(lot for batches, lot in self._lots.items() if _behind(batches, ckpt))

    def overdue(self, ckpt: Mapping[str, int], retention_s: float, may: Collection[str]) -> list[Group]:
        """Return groups that wait longer than ``retention_s`` for checkpoints, only of subscriptions in ``may``."""
        limit = time.monotonic() - retention_s
        lots = ((batches, lot) for batches, lot in self._lots.items() if lot.spent_at < limit)
        return _flat(
            lot
            for batches, lot in lots
            if not _behind(batches, ckpt) and _behind({(sub, n) for sub, n in batches if sub not in may}, ckpt)
        )


def _behind(batches: Collection[tuple[str, int]], ckpt: Mapping[str, int]) -> bool:
    # Batches of a dropped subscription block nothing.
    return all(n <= ckpt.get(sub, n) for sub, n in batches)


def _flat(lots: Iterable[_Lot]) -> list[Group]:
    return [group for lot in lots for group in lot.groups.values()]
