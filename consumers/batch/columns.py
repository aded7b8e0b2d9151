"""Columns: arrays that one role writes for the samples of a batch, and another role reads (T13).

    critic   batch.put("values", values)   announce (control, fenced) ─> a value per row, on the row's payload server
                                           (on the control Redis if that server is a folder)
  actor    batch.get("values")           waits, reported by name, until every row of its share has a value

A value is per token ([length] or [length, width]) or per sample (one number), see column_values.py; rows are identified
by their place in the manifest, so writer and reader may split the batch differently. Keys carry the batch's digest and
the subscription's generation: late writes of a rank of an older lineage are never read. A value is written once.
Columns are freed with their batch, and expire otherwise.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ProtocolError, WaitTimeout
from penstock.names import check_name
from penstock.protocol import scripts
from penstock.protocol.records.causes import ColumnPending
from penstock.protocol.records.manifest import Row
from penstock.protocol.records.small_maps import count_shown, name_shown
from penstock.redis.commands import Client

if TYPE_CHECKING:
    from penstock.consumers.batch.fetch import PayloadReader
    from penstock.consumers.subscription.subscriber import Subscriber

log = logging.getLogger(__name__)

#: Most columns of one batch, counted once per payload server that holds a part.
MAX_COLUMNS = 256
#: Rows per round trip.
CHUNK = 128
#: Seconds before missing rows are read again; doubles.
LOOK_S, LONGEST_LOOK_S = 0.002, 0.05
#: Seconds between two checks of the subscription's ownership during a wait.
CHECK_S = 0.5


class Store(Protocol):
    """Values of one batch by column and row."""

    def write(self, name: str, values: Mapping[int, bytes]) -> None: ...

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]: ...

    def tell_lost(self, name: str, rows: Sequence[int]) -> None:
        """Report that the writer had lost the payloads of these rows, which have no value."""


class LocalColumns:
    """Columns of a replayed batch, without a queue: this process reads what it put.

    Args:
        values: initial values, by column and row.
    """

    def __init__(self, values: Mapping[str, Mapping[int, bytes]] | None = None) -> None:
        #: By column and row.
        self.values: dict[str, dict[int, bytes]] = {name: dict(of) for name, of in (values or {}).items()}

    def tell_lost(self, name: str, rows: Sequence[int]) -> None:
        """Ignore lost payloads: a replay counts none."""

    def write(self, name: str, values: Mapping[int, bytes]) -> None:
        self.values.setdefault(name, {}).update(values)

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return values of ``rows``. Raises WaitTimeout at once if one is missing, as no other process writes here."""
        held = self.values.get(name, {})
        if missing := [row for row in rows if row not in held]:
            raise WaitTimeout(
                f"Column {name!r} was not put for {len(missing)} of {len(rows)} rows, and no other process will.",
                count=len(rows) - len(missing),
                cause=ColumnPending(name, 0, len(missing), len(rows)),
            )
        return {row: held[row] for row in rows}


class RedisColumns:
    """Columns of one delivered batch. Not thread-safe.

    Args:
        subscriber: the batch's subscription; announces and waits in its name.
        servers: connections to the payload servers.
        rows: of the complete batch.
        ttl_s: time after which columns that are not freed expire.
        redone: True for a batch that all roles had committed before this one was restored: nothing is written, and
            columns are those of the lineage that committed it.
    """

    def __init__(
        self,
        subscriber: "Subscriber",
        servers: "PayloadReader",
        rows: Sequence[Row],
        n: int,
        digest: str,
        *,
        ttl_s: int,
        redone: bool = False,
    ) -> None:
        self._subscriber = subscriber
        self._servers = servers
        self._rows = rows
        self._n = n
        self._digest = digest
        self._ttl_s = ttl_s
        self._redone = redone
        #: Generation in which the batch was delivered; a rewind ends it.
        self._gen = subscriber.gen

    def write(self, name: str, values: Mapping[int, bytes]) -> None:
        """Write values of this rank's rows. Blocks for two round trips. Writing the same values again has no effect.

        Raises:
            ProtocolError: already committed, a foreign batch, too many columns, or other values than before.
            OwnershipLost: the subscription was rewound or belongs to another trainer.
        """
        if self._redone:
            return
        by_server = self._by_server(values)
        key = self._key(name, self._gen)
        self._announce(name, [(server, key) for server in by_server])
        for server, rows in by_server.items():
            for start in range(0, len(rows), CHUNK):
                part = {row: values[row] for row in rows[start : start + CHUNK]}
                call = scripts.write_column(key, self._ttl_s, part)
                other = self._servers.on_columns(server, partial(scripts.run, call=call))
                if other:
                    raise ProtocolError(
                        f"Column {name!r} of batch {self._n} holds another value for sample "
                        f"{self._rows[other[0]].sample} already: a column is written once; use another name."
                    )

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return values of ``rows``; blocks until all are present, and reports which are missing.

        Raises WaitTimeout, OwnershipLost.
        """
        key = self._key(name, self._gen)
        found: dict[int, bytes] = {}
        waiting, deadline = self._subscriber.waiting, time.monotonic() + timeout_s
        pause_s, check_at = LOOK_S, time.monotonic() + CHECK_S
        while missing := [row for row in rows if row not in found]:
            if self._redone:
                key = self._key(name, self._newest_gen(name))
            before = len(found)
            for server, of_server in self._by_server(missing).items():
                for start in range(0, len(of_server), CHUNK):
                    found |= self._fetch(server, key, of_server[start : start + CHUNK])
            if len(found) == len(rows):
                break
            cause = ColumnPending(name, self._n, len(rows) - len(found), len(rows))
            if (now := time.monotonic()) > deadline:
                raise WaitTimeout(
                    f"{cause}, did not arrive within {timeout_s:g} s: the role that puts it is dead, stuck, or does "
                    f"not put it; the first missing one is of sample {self._rows[missing[0]].sample}.",
                    count=len(found),
                    cause=cause,
                )
            waiting.blocked_on(cause)
            if now > check_at:
                self._subscriber.ownership.check_lineage(self._gen)
                check_at = now + CHECK_S
            pause_s = LOOK_S if len(found) > before else min(2 * pause_s, LONGEST_LOOK_S)
            time.sleep(pause_s)
        waiting.end()
        return found

    def tell_lost(self, name: str, rows: Sequence[int]) -> None:
        """Log and count that the writer had no payload for these rows. Blocks for one round trip."""
        subscriber = self._subscriber
        values = [f"{self._digest}/{name}/{row}" for row in rows]
        call = scripts.column_lost(subscriber.keys, subscriber.name, self._ttl_s, values)
        if new := subscriber.control.call(call):
            log.warning(
                "column %s of batch %d has no value for %d samples, including %s: the writer had lost their payloads",
                name,
                self._n,
                new,
                self._rows[rows[0]].sample,
            )

    def _announce(self, name: str, places: list[tuple[str, str]]) -> None:
        subscriber = self._subscriber
        answer = subscriber.control.call(
            scripts.column(
                subscriber.keys,
                subscriber.name,
                owner=subscriber.owner,
                gen=self._gen,
                n=self._n,
                digest=self._digest,
                rank=subscriber.seat.rank,
                role=subscriber.seat.role,
                most=MAX_COLUMNS,
                ttl_s=self._ttl_s,
                places=places,
            )
        )
        if answer == "owner":
            subscriber.ownership.check_lineage(self._gen)
        why = {
            "owner": "the subscription belongs to another trainer by now",
            "role": f"the subscription has no role {subscriber.seat.role!r}",
            "unknown": "the batch does not exist any more",
            "diverged": "Redis holds another batch of this number, as after a failover: rewind to a checkpoint",
            "committed": "this rank has committed it; put every column before the commit",
            "full": f"it has {MAX_COLUMNS} columns already",
        }.get(answer)
        if why is not None:
            raise ProtocolError(f"Column {name!r} cannot be put to batch {self._n} of {subscriber.name!r}: {why}.")

    def _fetch(self, server: str, key: str, rows: list[int]) -> dict[int, bytes]:
        def ask(client: Client) -> list[bytes | None]:
            return client.hmget(key, rows)

        values = self._servers.on_columns(server, ask)
        return {row: value for row, value in zip(rows, values, strict=True) if value is not None}

    def _newest_gen(self, name: str) -> int:
        """Return the generation that committed the batch, the last one that wrote for it."""
        subscriber, n = self._subscriber, self._n
        listed = subscriber.control.do(
            lambda client: client.zrangebyscore(subscriber.keys.columns(subscriber.name), n, n)
        )
        prefix, suffix = self._key(name, 0).rsplit("0:", 1)[0], f":{name}"
        found = [name_shown(place).partition("|")[2] for place in listed]
        ours = [key for key in found if key.startswith(prefix) and key.endswith(suffix)]
        gens = [count_shown(key.removeprefix(prefix).removesuffix(suffix).encode()) for key in ours]
        return max((gen for gen in gens if gen is not None), default=self._gen)

    def _key(self, name: str, gen: int) -> str:
        return self._subscriber.keys.column(
            self._subscriber.name, self._n, self._digest, gen, check_name("column", name)
        )

    def _by_server(self, rows: "Mapping[int, bytes] | Sequence[int]") -> dict[str, list[int]]:
        grouped: dict[str, list[int]] = {}
        for row in rows:
            grouped.setdefault(self._servers.column_home(self._rows[row].server), []).append(row)
        return grouped
