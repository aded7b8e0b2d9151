"""Metadata of ready groups: read when a group is ingested, for its manifest, and when it is swept."""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client

#: Most samples whose records are cached, at about 1.5 kB each: with a bound on staleness a group is usually trained and
#: swept while it is cached; others are read again.
KEPT_SAMPLES = 8192


class Records:
    """Records by job. A ready group's records never change, so the cache is valid as long as the group exists."""

    def __init__(self, client: Client, keys: Keys, kept_samples: int = KEPT_SAMPLES) -> None:
        self._client = client
        self._keys = keys
        self._kept_samples = kept_samples
        self._kept: OrderedDict[str, list[SampleMeta]] = OrderedDict()
        self._count = 0

    def put(self, job: str, meta: bytes | None) -> list[SampleMeta]:
        """Parse and cache the metadata of a group that has become ready; return its records."""
        self.forget(job)
        records = list(iter_metas(meta or b"", f"metadata of group {job}"))
        self._kept[job] = records
        self._count += len(records)
        while self._count > self._kept_samples and len(self._kept) > 1:
            self._count -= len(self._kept.popitem(last=False)[1])
        return records

    def read(self, jobs: Sequence[str]) -> list[list[SampleMeta]]:
        """Return the records of each group; [] if they are missing or invalid. Blocks if one is not cached."""
        missing = [job for job in jobs if job not in self._kept]
        metas = self._client.mget([self._keys.meta(job) for job in missing]) if missing else []
        found = {job: _readable(job, meta) for job, meta in zip(missing, metas, strict=True)}
        return [self._kept[job] if job in self._kept else found[job] for job in jobs]

    def forget(self, job: str) -> None:
        """Remove a deleted group from the cache."""
        self._count -= len(self._kept.pop(job, ()))


def _readable(job: str, meta: bytes | None) -> list[SampleMeta]:
    """Parse records; [] for an invalid group: nothing of it was made permanent, so its payloads expire."""
    try:
        return list(iter_metas(meta or b"", f"metadata of group {job}"))
    except ProtocolError:
        return []
