"""Read the payload bytes of a rank's rows from their servers in chunks.

A key with several samples is read completely if this rank needs all of them; otherwise only their ranges are read.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from penstock import payloads
from penstock.config import RedisConfig
from penstock.errors import ConfigError, PayloadError, QueueUnavailable, WaitTimeout
from penstock.payloads import Payload, sides
from penstock.payloads import servers as payload_servers
from penstock.payloads.servers import Directory
from penstock.payloads.sides import key_of
from penstock.payloads.store import PayloadStore, open_store
from penstock.protocol.waits import Waiting
from penstock.records.causes import PayloadServersAway
from penstock.records.keys import CONTROL, Keys
from penstock.records.manifest import Row, first_rows
from penstock.records.sample_meta import SampleMeta
from penstock.redis.commands import Client
from penstock.redis.control import Control, until_answered
from penstock.system.garbage_collection import collecting_later

log = logging.getLogger(__name__)

Bytes = bytes | memoryview
#: Bytes by sample id (``Row.payload_id``), or a callable that returns them for a row; None for a payload that was lost
#: after the cut.
Payloads = Mapping[str, Bytes | None] | Callable[[Row], Bytes | None]
#: Reads a side array of rows by name; returns bytes by sample id, None if lost, without rows that lack the array.
ReadSides = Callable[[Sequence[Row], str], Mapping[str, bytes | None]]


class OpenedPayloads:
    """Decode the payloads of one rank's rows of batch ``n`` on first use."""

    def __init__(self, n: int, rows: Sequence[Row], data: Payloads, read_sides: ReadSides | None) -> None:
        self._n = n
        self._rows = rows
        self._data = data
        self._read_sides = read_sides
        #: Complete payloads of samples with several parts, by id.
        self._divided: dict[str, Payload | None] = {}

    @cached_property
    def all(self) -> list[Payload | None]:
        """Return views into the payload of each row, None if lost; decoded once. Raises PayloadError."""
        with collecting_later():
            return [self._open(row) if row.begin < 0 else self._open_part(row) for row in self._rows]

    def side(self, name: str) -> list[NDArray[Any] | None]:
        """Return side array ``name`` of each row, None if absent; see ``Batch.side``."""
        alive = [row for row, payload in zip(self._rows, self.all, strict=True) if payload is not None]
        found = self._stored_sides(alive, name)
        arrays = []
        for row in self._rows:
            array = found.get(row.payload_id)
            if array is not None and row.begin >= 0 and (whole := self._divided[row.payload_id]) is not None:
                array = sides.cut(name, array, whole, row.begin, row.begin + row.length, row.sample)
            arrays.append(array)
        return arrays

    def _stored_sides(self, alive: Sequence[Row], name: str) -> dict[str, NDArray[Any] | None]:
        """Return side array ``name`` by payload id, for arrays with their own key. Raises PayloadError."""
        if not any(side[0] == name for row in self._rows for side in row.sides):
            return {}
        if self._read_sides is None:
            raise PayloadError(f"batch {self._n} cannot read side arrays: pass read_sides.")
        rows = first_rows(alive)
        found = self._read_sides(rows, name)
        return {row.payload_id: _unpacked(row, name, found) for row in rows}

    def _open_part(self, row: Row) -> Payload | None:
        if row.payload_id not in self._divided:
            self._divided[row.payload_id] = self._open(row)
        whole = self._divided[row.payload_id]
        return None if whole is None else whole.cut(row.begin, row.begin + row.length)

    def _open(self, row: Row) -> Payload | None:
        if row.lost:
            return None
        try:
            data = self._data(row) if callable(self._data) else self._data[row.payload_id]
        except KeyError as exc:
            raise PayloadError(
                f"sample {row.sample}: batch {self._n} was made without its payload: add it to `payloads`."
            ) from exc
        return None if data is None else payloads.decode(data, row.payload_id, row.checksum)


def row_of_meta(job: str, meta: SampleMeta) -> Row:
    """Return the location of a sample's payload for ``PayloadReader``."""
    return Row(
        job=job, k=meta.k, token=meta.token, server=meta.server, checksum=meta.checksum,
        num_bytes=meta.num_bytes, length=meta.length, prompt_length=meta.prompt_length,
        num_generated=meta.num_generated, num_loss=meta.num_loss, oldest=meta.oldest, newest=meta.newest,
        oldest_loss=meta.oldest, reward=meta.reward, status=meta.status, shared=meta.shared,
    )  # fmt: skip


def _unpacked(row: Row, name: str, found: Mapping[str, bytes | None]) -> NDArray[Any] | None:
    if row.payload_id not in found:
        return None
    data = found[row.payload_id]
    if data is None:
        raise PayloadError(f"sample {row.sample}: its side array {name!r} is gone from its payload server.")
    return sides.unpack(name, data, row.sample, next(side[2] for side in row.sides if side[0] == name))


#: Most payload bytes per request: answers that fit the CPU caches cost both sides half as much as 16 MB.
CHUNK_BYTES = 2 * 1024 * 1024

#: Seconds between directory checks for a server that does not respond.
POLL_S = 0.5

T = TypeVar("T")


class PayloadReader:
    """Read from the payload servers, across their restarts. Not thread-safe.

    An unreachable server is retried until it responds or the run's directory marks it as lost.

    Args:
        waiting: reports waits for a server.
        stopped: polled during a wait; true ends the wait with QueueUnavailable.
    """

    def __init__(
        self,
        config: RedisConfig,
        keys: Keys | None = None,
        waiting: Waiting | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        if config.url is None:
            raise ConfigError("redis.url is not set: set the address of the run's Redis.")
        self._config = config
        self._keys = keys
        self._stopped = stopped
        self._control = Control(config.url, stopped=stopped)
        self._stores: dict[str, PayloadStore] = {CONTROL: PayloadStore(self._control.client, config.url)}
        self._waiting = waiting
        self._lost: frozenset[str] = frozenset()
        #: Time of the next directory check (monotonic).
        self._look_at = 0.0
        self._deadline_s = math.inf

    def read(self, keys: Keys, rows: Sequence[Row], deadline_s: float = math.inf) -> dict[str, Bytes | None]:
        """Return bytes by sample id, None if the payload is gone or its server is lost. Blocks.

        Raises WaitTimeout if a server does not respond by ``deadline_s`` (monotonic).
        """
        self._deadline_s = deadline_s
        try:
            return self._read(keys, rows)
        finally:
            self._deadline_s = math.inf

    def _read(self, keys: Keys, rows: Sequence[Row]) -> dict[str, Bytes | None]:
        self._keys = keys
        found: dict[str, Bytes | None] = {}
        by_key: dict[tuple[str, str], list[Row]] = {}
        for row in first_rows(rows):
            home = row.shared[0] if row.shared else row.k
            by_key.setdefault((row.server, keys.payload(f"{row.job}/{home}", row.token)), []).append(row)
        for server in {server for server, _ in by_key}:
            stored = [_Stored(name, rows) for (of, name), rows in by_key.items() if of == server]
            for chunk in _chunks([one for one in stored if one.whole]):
                values = self._ask(server, PayloadStore.read, [one.name for one in chunk])
                for one, value in zip(chunk, values, strict=True):
                    found.update(one.cut(value))
            for chunk in _chunks([one for one in stored if not one.whole]):
                parts = [(one.name, row) for one in chunk for row in one.rows]
                ranges = [(name, row.shared[1], row.num_bytes) for name, row in parts]
                values = self._ask(server, PayloadStore.read_ranges, ranges)
                found.update((row.payload_id, value) for (_, row), value in zip(parts, values, strict=True))
        return found

    def _ask(
        self, server: str, read: Callable[[PayloadStore, Sequence[T]], list[bytes | None]], wanted: Sequence[T]
    ) -> list[bytes | None]:
        """Read ``wanted`` from a server; return None for each if it is lost. Blocks until it responds or is lost."""
        nothing: list[bytes | None] = [None] * len(wanted)
        if server in self._lost:
            # Check the directory: the server may be back.
            self._look_at = 0.0
            if self._is_lost(server):
                return nothing
        try:
            store = self._store(server)
            return self._until_answered(server, lambda: read(store, wanted))
        except QueueUnavailable:
            if server not in self._lost:
                raise
            log.warning("payload server %s is lost; training its samples with mask 0", server)
            return nothing
        finally:
            if self._waiting is not None:
                self._waiting.end()

    def _until_answered(self, server: str, work: Callable[[], T]) -> T:
        if server == CONTROL:
            return self._control.do(lambda _: work())
        return until_answered(work, self._stores[server].url, stopped=partial(self._is_lost, server))

    def _is_lost(self, server: str) -> bool:
        """Report an unreachable server and return whether it was declared lost. May block."""
        away = PayloadServersAway((server,))
        if self._waiting is not None and server not in self._lost:
            self._waiting.blocked_on(away)
        if time.monotonic() >= self._deadline_s:
            raise WaitTimeout(f"The payloads of a batch were not read in time: blocked on {away}.", cause=away)
        if self._keys is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + POLL_S
            directory = self._control.do(partial(payload_servers.read, keys=self._keys))
            self._lost = frozenset(directory.lost)
        return server in self._lost or self._stopped()

    def read_sides(self, keys: Keys, rows: Sequence[Row], name: str) -> dict[str, bytes | None]:
        """Return a side array's bytes by sample id, None if gone, without rows that lack the array. Blocks."""
        self._keys = keys
        found: dict[str, bytes | None] = {}
        #: Arrays shared by the rows of a group.
        shared: dict[tuple[str, str], bytes | None] = {}
        for row in rows:
            for side in (side for side in row.sides if side[0] == name):
                at = (row.server, key_of(keys, row.job, row.k, row.token, side))
                if at not in shared:
                    # Read one at a time, as each may have hundreds of megabytes.
                    (data,) = self._ask(row.server, PayloadStore.read, [at[1]])
                    found[row.payload_id] = data
                    if len(side) > 3:
                        shared[at] = data
                else:
                    found[row.payload_id] = shared[at]
        return found

    def _store(self, server: str) -> PayloadStore:
        """Return a payload server by name; raise ProtocolError if it is unknown. Blocks on first use."""
        if server not in self._stores:
            keys = None if server in self._config.payload_servers else self._keys
            directory = self._control.do(partial(payload_servers.read, keys=keys)) if keys else Directory()
            self._stores[server] = open_store(directory.url(server, self._config))
        return self._stores[server]

    def column_home(self, server: str) -> str:
        """Return the server for columns of rows whose payloads are on ``server``."""
        return CONTROL if server in self._lost else server

    def on_columns(self, home: str, work: Callable[[Client], T]) -> T:
        """Run idempotent ``work`` on a ``column_home``. Blocks until it responds; raises QueueUnavailable if lost."""
        client = self._store(home).client
        return self._until_answered(home, lambda: work(client))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


@dataclass(frozen=True, slots=True)
class _Stored:
    """Describe one key and the rows to read from it."""

    name: str
    rows: list[Row]

    @property
    def num_bytes(self) -> int:
        return sum([row.num_bytes for row in self.rows])

    @property
    def whole(self) -> bool:
        """Return whether the complete key is needed."""
        shared = self.rows[0].shared
        return not shared or self.num_bytes == shared[2]

    def cut(self, value: bytes | None) -> Iterable[tuple[str, Bytes | None]]:
        """Split the complete value into (sample, bytes) pairs."""
        if value is None or not self.rows[0].shared:
            return [(row.payload_id, value) for row in self.rows]
        view = memoryview(value)
        return [(row.payload_id, view[row.shared[1] : row.shared[1] + row.num_bytes]) for row in self.rows]


def _chunks(stored: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Yield keys in chunks of at most ``CHUNK_BYTES`` or one key."""
    chunk: list[_Stored] = []
    size = 0
    for one in stored:
        if chunk and size + one.num_bytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(one)
        size += one.num_bytes
    if chunk:
        yield chunk
