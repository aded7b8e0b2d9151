"""Several datasets as one endless sequence: an order that is a function of seed and position."""

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


class Weighted(Mixture):
    """position -> (dataset, epoch of that dataset, prompt).

    The datasets take turns in a round that repeats: each has as many places as its share, spread evenly, so that in any
    range of positions no dataset deviates from its share by more than 1 + its share of the number of datasets. The k-th
    place of a dataset is its prompt k modulo its lines, in its epoch k divided by them.
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
        """Return the line at a place of an epoch: among all lines, or for a stream those of its window."""
        dataset = self.datasets[d]
        if dataset.stream is None:
            return int(self._lines(d, epoch)[at])
        begin, num_lines = dataset.window_of(dataset.stream, at)
        return begin + int(self._windows(d, epoch, begin, num_lines)[at - begin])

    def _lines_of(self, d: int, epoch: int) -> Order:
        """Return [lines of dataset ``d``] in the order of an epoch."""
        dataset = self.datasets[d]
        return order_of(len(dataset), [self.seed, d, epoch] if self.shuffles(dataset) else None)

    def _window_of(self, d: int, epoch: int, begin: int, num_lines: int) -> Order:
        """Return [lines of a window] in the order of an epoch."""
        return order_of(num_lines, [self.seed, d, epoch, begin] if self.shuffles(self.datasets[d]) else None)


def mixture_of(datasets: Sequence[Dataset], seed: int) -> Mixture:
    """Make a mixture by weights if the datasets have them, else one after the other; a single stream is weighted."""
    weighted = any(one.config.weight is not None or one.stream is not None for one in datasets)
    return Weighted(datasets, seed) if weighted else Mixture(datasets, seed)


def _round_of(shares: Sequence[int]) -> tuple[Any, Any]:
    """Return, for [places of a round], the dataset of each, and its number among the dataset's places in the round.

    A dataset's i-th of s places is due at (i + 1/2) / s of the round; all are sorted by that, and ties by the order of
    the datasets.
    """
    datasets = np.repeat(np.arange(len(shares)), shares)
    ranks = np.concatenate([np.arange(share) for share in shares])
    wanted = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    order = np.argsort(wanted, kind="stable")
    return datasets[order], ranks[order]
