"""Mixture of datasets by weights: these determine the dataset of a position, and with the seed its line."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.config.reading.shares import shares_of
from penstock.producer.dataset import Dataset
from penstock.producer.mixture import Mixture, Order, order_of


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
