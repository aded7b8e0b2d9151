"""Order a subscription's unused groups for its batches.

Adding and removing take constant time. For each batch the uniform order copies the pool, and the orders by priority and
by difficulty sort it (20 ms for 100,000 groups by priority). ``order(n, floor)`` is a pure function of the pool's
content, the order of arrival, the seed, the batch number and the floor; redelivery reads the stored manifest instead.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from penstock.buffer.group import Group
from penstock.config.staleness import Sampler

#: Weight of a group whose priority is 0 or less: sampled last, but not excluded.
MIN_WEIGHT = 1e-9
#: Largest distance of a share of correct answers from one half, in steps.
MAX_DISTANCE = 256


class Pool:
    """Unused groups of one subscription in the order of arrival (``fifo``), also indexed by oldest version."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[str, Group] = OrderedDict()
        self._buckets: dict[int, OrderedDict[str, Group]] = {}
        self.samples = self.tokens = self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, group: Group) -> bool:
        return group.job in self._arrived

    def __iter__(self) -> Iterator[Group]:
        """Iterate in the order of arrival."""
        return iter(self._arrived.values())

    @property
    def versions(self) -> dict[int, int]:
        """Return oldest version -> number of groups."""
        return {version: len(bucket) for version, bucket in self._buckets.items()}

    def add(self, group: Group) -> None:
        """Add a group; adding it twice changes nothing."""
        if group.job in self._arrived:
            return
        self._arrived[group.job] = group
        self._buckets.setdefault(group.oldest, OrderedDict())[group.job] = group
        self._count(group, 1)

    def discard(self, group: Group) -> None:
        """Remove a group if the pool contains it."""
        if self._arrived.pop(group.job, None) is None:
            return
        bucket = self._buckets[group.oldest]
        del bucket[group.job]
        if not bucket:
            del self._buckets[group.oldest]
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        self.samples += sign * group.n
        self.tokens += sign * group.tokens
        self.num_bytes += sign * group.num_bytes

    def order(self, n: int, floor: int = -1) -> Iterator[Group]:
        """Yield the groups in the order in which batch ``n`` takes them; the pool must not change meanwhile.

        Args:
            floor: oldest version that may bear loss in the batch.
        """
        return iter(self)

    def by_version(self, newest: bool = False) -> Iterator[Group]:
        """Yield the groups by version, oldest (or newest) first, regardless of the pool's own order."""
        for version in sorted(self._buckets, reverse=newest):
            yield from self._buckets[version].values()

    def below(self, version: int) -> list[Group]:
        """Return the groups with a token older than ``version``."""
        old = (bucket for oldest, bucket in self._buckets.items() if 0 <= oldest < version)
        return [group for bucket in old for group in bucket.values()]


class VersionPool(Pool):
    """Order groups by version, oldest or newest first, then by arrival."""

    def __init__(self, newest: bool = False) -> None:
        super().__init__()
        self._newest = newest

    def order(self, n: int, floor: int = -1) -> Iterator[Group]:
        return self.by_version(self._newest)


class UniformPool(Pool):
    """Order groups uniformly at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def order(self, n: int, floor: int = -1) -> Iterator[Group]:
        # Fisher-Yates shuffle, only as far as the caller iterates.
        rng, groups = random.Random(f"{self._seed}/{n}"), list(self)
        for i in range(len(groups)):
            j = rng.randrange(i, len(groups))
            groups[i], groups[j] = groups[j], groups[i]
            yield groups[i]


class PriorityPool(Pool):
    """Sample groups in proportion to max(priority, 0) ** exponent, without replacement (arXiv 1511.05952, 3.3)."""

    def __init__(self, seed: int, field: str, exponent: float) -> None:
        super().__init__()
        self._seed, self._field, self._exponent = seed, field, exponent
        #: Weight of each group, in the order of arrival.
        self._weights: dict[str, float] = {}

    def add(self, group: Group) -> None:
        self._weights.setdefault(group.job, self._weight(group))
        super().add(group)

    def discard(self, group: Group) -> None:
        self._weights.pop(group.job, None)
        super().discard(group)

    def _weight(self, group: Group) -> float:
        priority = group.priority.get(self._field, 0.0)
        try:
            weight = priority**self._exponent if priority > 0 else 0.0
        except OverflowError:
            weight = 1e300
        return min(max(weight, MIN_WEIGHT), 1e300)

    def order(self, n: int, floor: int = -1) -> Iterator[Group]:
        # Sorting exponential times with the weights as rates samples without replacement in proportion to the weights.
        weights, groups = np.fromiter(self._weights.values(), np.float64), list(self)
        times = np.random.default_rng((self._seed, n)).exponential(size=len(groups)) / weights
        return (groups[place] for place in np.argsort(times, kind="stable").tolist())


class DifficultyPool(Pool):
    """Order groups by how close their share of correct answers is to one half, from which a policy learns most.

    Groups that would be stale for the next version come before them, oldest first."""

    def order(self, n: int, floor: int = -1) -> Iterator[Group]:
        for group in self.by_version():
            if group.oldest > floor:
                break
            yield group
        yield from sorted((group for group in self if group.oldest > floor), key=_distance)


def _distance(group: Group) -> int:
    """Return the distance of the share of correct answers from one half, from 0 to ``MAX_DISTANCE``."""
    return round(MAX_DISTANCE * abs(2 * group.right - 1))


class CohortPool(Pool):
    """Index unused groups by their place in the order of admission; a batch consists of the next places."""

    def __init__(self) -> None:
        super().__init__()
        self._by_seq: dict[int, Group] = {}

    def add(self, group: Group) -> None:
        super().add(group)
        self._by_seq[group.seq] = group

    def discard(self, group: Group) -> None:
        super().discard(group)
        if self._by_seq.get(group.seq) is group:
            del self._by_seq[group.seq]

    def places(self, first: int, last: int) -> list[Group]:
        """Return the groups admitted at places first .. last; places of dead or cancelled jobs are skipped."""
        found = (self._by_seq.get(seq) for seq in range(first, last + 1))
        return [group for group in found if group is not None]

    def next_place(self, first: int) -> int | None:
        """Return the smallest occupied place >= ``first``, or None. Scans every group."""
        return min((seq for seq in self._by_seq if seq >= first), default=None)


def make_pool(sampler: Sampler, *, seed: int = 0, priority: str = "reward", exponent: float = 1.0) -> Pool:
    """Make the pool for a sampler."""
    match sampler:
        case Sampler.COHORT:
            return CohortPool()
        case Sampler.OLDEST_VERSION | Sampler.NEWEST_VERSION:
            return VersionPool(newest=sampler == Sampler.NEWEST_VERSION)
        case Sampler.UNIFORM:
            return UniformPool(seed)
        case Sampler.PRIORITIZED:
            return PriorityPool(seed, priority, exponent)
        case Sampler.DIFFICULTY:
            return DifficultyPool()
        case _:
            return Pool()
