"""Mix datasets into one endless sequence whose order is a function of seed and position."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from penstock.config.data import shares_of
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Prompt

#: Most lines that are shuffled; their order takes 32 GiB of memory.
MAX_SHUFFLED = 2**32

#: [lines of an epoch]: line numbers in the order of the epoch.
Order: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]] | range"


class Mixture:
    """Map position -> (dataset, epoch, prompt), one dataset after the other or shuffled.

    If a dataset is shuffled, epoch e is a permutation of all lines by (seed, e). The position alone determines the next
    prompt, also after a crash.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int) -> None:
        self.datasets = list(datasets)
        self.seed = seed
        self.shuffle = any(dataset.config.shuffle for dataset in self.datasets)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """Return the number of lines in an epoch. Raises ConfigError with a stream whose end is not known yet."""
        return sum(map(len, self.datasets))

    @property
    def num_lines(self) -> int | None:
        """Return the number of lines in an epoch; None with a stream whose end is not known yet."""
        return None if any(one.num_lines is None for one in self.datasets) else len(self)

    def shuffles(self, dataset: Dataset) -> bool:
        """Return whether the lines of a dataset are shuffled."""
        return self.shuffle

    @cached_property
    def _starts(self) -> list[int]:
        """Return [datasets + 1]: the number of lines before each dataset, and of all."""
        return [0, *accumulate(map(len, self.datasets))]

    def at(self, position: int) -> tuple[Dataset, int, Prompt]:
        """Return the dataset, epoch and prompt of a position. Blocks for the disk. Raises the dataset's errors."""
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
    """Return [num_lines]: the line numbers of an epoch, permuted by ``seed`` (8 bytes per line), or ascending if None.

    Raises:
        ConfigError: there are more lines than ``MAX_SHUFFLED``, or than fit in memory.
    """
    if seed is None:
        return range(num_lines)
    try:
        if num_lines <= MAX_SHUFFLED:
            return np.random.default_rng(seed).permutation(num_lines)
    except MemoryError:
        pass
    raise ConfigError(
        f"data.train has {num_lines:,} lines, and the order of a shuffled epoch takes 8 bytes of memory per line: "
        "use a slice of the datasets, or set their shuffle: false."
    )


class Weighted(Mixture):
    """Map position -> (dataset, epoch of that dataset, prompt) according to the datasets' weights.

    A round of positions repeats; each dataset has as many places in it as its share, evenly spread: in any range of
    positions a dataset deviates from its share by at most 1 + its share times the number of datasets. The k-th place of
    a dataset is line k % lines of its epoch k // lines.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int) -> None:
        super().__init__(datasets, seed)
        self._shares = shares_of([one.config.weight or 1 for one in self.datasets])
        self._turns, self._ranks = _round_of(self._shares)
        self._lines = lru_cache(maxsize=2 * len(self.datasets))(self._lines_of)
        self._windows = lru_cache(maxsize=2 * len(self.datasets))(self._window_of)

    def shuffles(self, dataset: Dataset) -> bool:
        return dataset.config.shuffle

    def place(self, position: int) -> tuple[Dataset, int, int]:
        rounds, offset = divmod(position, len(self._turns))
        d = int(self._turns[offset])
        k = rounds * self._shares[d] + int(self._ranks[offset])
        epoch, at = self.datasets[d].pass_of(k)
        return self.datasets[d], epoch, self._line(d, epoch, at)

    def _line(self, d: int, epoch: int, at: int) -> int:
        """Return the line at a place of an epoch, shuffled among all lines or, for a stream, in its window."""
        dataset = self.datasets[d]
        if dataset.stream is None:
            return int(self._lines(d, epoch)[at])
        begin, num_lines = dataset.window_of(dataset.stream, at)
        return begin + int(self._windows(d, epoch, begin, num_lines)[at - begin])

    def _lines_of(self, d: int, epoch: int) -> Order:
        """Return [lines of dataset ``d``]: line numbers in the order of an epoch."""
        dataset = self.datasets[d]
        return order_of(len(dataset), [self.seed, d, epoch] if self.shuffles(dataset) else None)

    def _window_of(self, d: int, epoch: int, begin: int, num_lines: int) -> Order:
        """Return [lines of a window]: line numbers in the order of an epoch."""
        return order_of(num_lines, [self.seed, d, epoch, begin] if self.shuffles(self.datasets[d]) else None)


def mixture_of(datasets: Sequence[Dataset], seed: int) -> Mixture:
    """Make a weighted mixture if a dataset has a weight or is a stream, else an unweighted one."""
    weighted = any(one.config.weight is not None or one.stream is not None for one in datasets)
    return Weighted(datasets, seed) if weighted else Mixture(datasets, seed)


def _round_of(shares: Sequence[int]) -> tuple[Any, Any]:
    """Return two arrays [places of a round]: the dataset at each place, and the place's rank within that dataset.

    Place i of a dataset's s places is due at (i + 1/2) / s of the round; ties keep the order of the datasets.
    """
    datasets = np.repeat(np.arange(len(shares)), shares)
    ranks = np.concatenate([np.arange(share) for share in shares])
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    order = np.argsort(due, kind="stable")
    return datasets[order], ranks[order]
