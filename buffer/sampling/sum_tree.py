"""Weighted sampling without replacement from a changing set, each operation in logarithmic time."""

from collections.abc import Iterator
from random import Random
from typing import Generic, TypeVar

T = TypeVar("T")


class SumTree(Generic[T]):
    """Items with weights > 0 in the leaves of a binary tree; every node holds the sum below it.

    Sums are recomputed on the way up, never adjusted, so that rounding errors do not accumulate.
    """

    def __init__(self) -> None:
        self._capacity = 1
        #: Node i has the children 2 i and 2 i + 1; leaves begin at ``_capacity``.
        self._sums = [0.0, 0.0]
        self._items: list[T | None] = [None]
        self._slots: dict[str, int] = {}
        self._free = [0]

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: str, item: T, weight: float) -> None:
        """Add an item under a new key."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[key] = slot
        self._items[slot] = item
        self._set(slot, weight)

    def remove(self, key: str) -> None:
        """Remove the item of an existing key."""
        slot = self._slots.pop(key)
        self._items[slot] = None
        self._free.append(slot)
        self._set(slot, 0.0)

    def draw(self, rng: Random) -> Iterator[T]:
        """Yield items, each with its share of the remaining weight. The tree is complete again when the
        iterator is closed or exhausted, and must not change before."""
        drawn: list[tuple[int, float]] = []
        try:
            while len(drawn) < len(self._slots):
                slot = self._find(rng.random() * self._sums[1])
                drawn.append((slot, self._sums[self._capacity + slot]))
                self._set(slot, 0.0)
                item = self._items[slot]
                assert item is not None
                yield item
        finally:
            for slot, weight in drawn:
                self._set(slot, weight)

    def _find(self, mark: float) -> int:
        node = 1
        while node < self._capacity:
            node *= 2
            # Rounding must not lead into a subtree that is empty.
            if (mark >= self._sums[node] and self._sums[node + 1] > 0) or self._sums[node] <= 0:
                mark -= self._sums[node]
                node += 1
        return node - self._capacity

    def _set(self, slot: int, weight: float) -> None:
        node = self._capacity + slot
        self._sums[node] = weight
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def _grow(self) -> None:
        old, leaves = self._capacity, self._sums[self._capacity :]
        self._capacity *= 2
        self._sums = [0.0] * self._capacity + leaves + [0.0] * old
        for node in range(self._capacity - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
        self._items += [None] * old
        self._free = list(range(self._capacity - 1, old - 1, -1))
