"""Payloads on a Redis: keys of the run, with a time to live until they are kept."""

from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.protocol.scripts import persist
from penstock.redis import connect
from penstock.redis.call import run
from penstock.redis.commands import Client
from penstock.redis.scan import delete_keys, scan_keys

#: Keys per pipeline.
CHUNK = 1000


class PayloadRedis:
    """A Redis with payloads, the control Redis or another one; see ``PayloadStore``."""

    def __init__(self, client: Client, url: str) -> None:
        self.url = url
        self.columns = self._client = client

    def check(self) -> None:
        connect.ask(self._client, self.url)

    def ping(self, prefix: str = "") -> None:
        self._client.ping()

    def claim(self, prefix: str) -> None:
        """Do nothing: keys of a run contain its name."""

    def keep(self, names: Sequence[str]) -> list[bool]:
        return run(self._client, persist(names))

    def unkeep(self, names: Sequence[str], ttl_s: float) -> None:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.expire(name, int(ttl_s) + 1)
        pipe.execute()

    def read(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        # Redis limits the size of its values itself.
        return list(self._client.mget([name for name, _ in wanted]))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        pipe = self._client.pipeline(transaction=False)
        for name, begin, num_bytes in ranges:
            pipe.getrange(name, begin, begin + num_bytes - 1)
        # A missing key has only empty ranges.
        return [value or None for value in pipe.execute()]

    def unlink(self, names: Sequence[str]) -> None:
        self._client.unlink(*names)

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Return 0: Redis expires keys itself."""
        return 0

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        found = scan_keys(self._client, prefix)
        while batch := list(islice(found, CHUNK)):
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.pttl(key)
            yield from ((key, ttl == -1) for key, ttl in zip(batch, pipe.execute(), strict=True) if ttl >= -1)

    def delete(self, prefix: str) -> int:
        return delete_keys(self._client, prefix)

    def usage(self) -> tuple[int, int]:
        info = self._client.info("memory")
        return info["used_memory"], info["maxmemory"]

    def close(self) -> None:
        self._client.close()
