"""Which groups a batch takes: the order in which a subscription's unused groups are looked at.

Every pool adds, removes and takes the first k in a time that does not grow with what it holds.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice

from buffer.group import Group


class Pool:
    """Unused groups of one subscription in buckets; buckets ascend, a bucket is in the order of completion.

    ``fifo`` has one bucket, ``oldest_version`` one per oldest version.
    """

    def __init__(self, by_version: bool) -> None:
        self._by_version = by_version
        self._buckets: dict[int, OrderedDict[str, Group]] = {}
        #: Oldest version -> groups.
        self.versions: Counter[int] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def _bucket_of(self, group: Group) -> int:
        return group.oldest if self._by_version else 0

    def __contains__(self, group: Group) -> bool:
        return group.job in self._buckets.get(self._bucket_of(group), ())

    def add(self, group: Group) -> None:
        """Add a group; adding it twice changes nothing."""
        bucket = self._buckets.setdefault(self._bucket_of(group), OrderedDict())
        if group.job not in bucket:
            bucket[group.job] = group
            self.versions[group.oldest] += 1
            self._size += 1

    def discard(self, group: Group) -> None:
        """Remove a group if it is there."""
        key = self._bucket_of(group)
        bucket = self._buckets.get(key)
        if bucket is None or bucket.pop(group.job, None) is None:
            return
        if not bucket:
            del self._buckets[key]
        self.versions[group.oldest] -= 1
        if not self.versions[group.oldest]:
            del self.versions[group.oldest]
        self._size -= 1

    def __iter__(self) -> Iterator[Group]:
        for key in sorted(self._buckets):
            yield from self._buckets[key].values()

    def first(self, count: int) -> list[Group]:
        """The first ``count`` groups, or as many as there are."""
        return list(islice(self, count))

    def below(self, version: int) -> list[Group]:
        """Groups that hold a token older than ``version``."""
        if not any(0 <= o < version for o in self.versions):
            return []
        old = (bucket for key, bucket in self._buckets.items() if not self._by_version or 0 <= key < version)
        return [group for bucket in old for group in bucket.values() if 0 <= group.oldest < version]

    def oldest(self, count: int) -> list[Group]:
        """The ``count`` groups of the oldest versions, whatever the order of this pool."""
        return self.first(count) if self._by_version else nsmallest(count, self, key=lambda group: group.oldest)


class CohortPool(Pool):
    """Unused groups by their place in the order of admission; a batch is the next places, complete."""

    def __init__(self) -> None:
        super().__init__(by_version=False)
        self._by_seq: dict[int, Group] = {}

    def add(self, group: Group) -> None:
        super().add(group)
        self._by_seq[group.seq] = group

    def discard(self, group: Group) -> None:
        super().discard(group)
        if self._by_seq.get(group.seq) is group:
            del self._by_seq[group.seq]

    def places(self, first: int, last: int) -> list[Group]:
        """Groups admitted at places first .. last; a place whose job is buried or cancelled has none."""
        found = (self._by_seq.get(seq) for seq in range(first, last + 1))
        return [group for group in found if group is not None]

    def next_place(self, first: int) -> int | None:
        """The first place from ``first`` on that is taken; None when none is. Looks at every group."""
        return min((seq for seq in self._by_seq if seq >= first), default=None)


def make_pool(sampler: str) -> Pool:
    """The pool of a subscription with this sampler."""
    if sampler == "cohort":
        return CohortPool()
    return Pool(by_version=sampler == "oldest_version")
