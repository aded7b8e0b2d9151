"""Several datasets as one endless sequence: an order that is a function of seed and position."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Prompt

#: Most lines that are shuffled: 32 GiB of memory.
MAX_SHUFFLED = 2**32

#: [lines of an epoch]
Order: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]] | range"


class Mixture:
    """position -> (dataset, epoch, prompt).

    Epoch e is a permutation by (seed, e) over all lines, at least of the shuffled datasets; so a position alone
    determines the next prompt, after any crash.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int) -> None:
        self.datasets = list(datasets)
        self.seed = seed
        self.shuffle = any(dataset.config.shuffle for dataset in self.datasets)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """Return the lines of one epoch. Raises ConfigError with a stream whose end is not known yet."""
        return sum(map(len, self.datasets))

    @property
    def num_lines(self) -> int | None:
        """Lines of one epoch; None with a stream whose end is not known yet."""
        return None if any(one.num_lines is None for one in self.datasets) else len(self)

    def shuffles(self, dataset: Dataset) -> bool:
        """Return whether the lines of a dataset are shuffled."""
        return self.shuffle

    @cached_property
    def _starts(self) -> list[int]:
        """[datasets + 1] lines before each."""
        return [0, *accumulate(map(len, self.datasets))]

    def at(self, position: int) -> tuple[Dataset, int, Prompt]:
        """Return the dataset, epoch and prompt of a position. Blocks for the disk. Raises errors of the dataset."""
        dataset, epoch, line = self.place(position)
        return dataset, epoch, dataset[line]

    def place(self, position: int) -> tuple[Dataset, int, int]:
        """Return the dataset, its epoch and the line in its slice of a position."""
        epoch, offset = divmod(position, self._starts[-1])
        place = int(self._order(epoch)[offset])
        d = bisect_right(self._starts, place) - 1
        return self.datasets[d], epoch, place - self._starts[d]

    def _order_of(self, epoch: int) -> Order:
        return order_of(len(self), [self.seed, epoch] if self.shuffle else None)


def order_of(num_lines: int, seed: list[int] | None) -> Order:
    """Return [num_lines] the lines of an epoch in its order: a permutation by ``seed``, with 8 bytes a line, or their
    own order if it is None.

    Raises:
        ConfigError: there are more than ``MAX_SHUFFLED``, or more than fit in memory.
    """
    if seed is None:
        return range(num_lines)
    try:
        if num_lines <= MAX_SHUFFLED:
            return np.random.default_rng(seed).permutation(num_lines)
    except MemoryError:
        pass
    raise ConfigError(
        f"data.train has {num_lines:,} lines, and the order of a shuffled epoch takes 8 bytes of memory for each: take "
        "a slice of its datasets, or set their shuffle: false."
    )
