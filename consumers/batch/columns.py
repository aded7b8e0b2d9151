"""Exchange columns between roles: arrays that one role writes for the samples of a batch, and another reads (T13).

    critic   batch.put("values", values)   announce (control, fenced) ─> a value per row on the row's payload server
    (on the control Redis if that server is a folder)
  actor    batch.get("values")           waits, and reports the wait, until every row of its share has a value

Values are per token ([length] or [length, width]) or per sample (one number). Rows are identified by their index in the
manifest, so writer and reader may split the batch differently. Keys contain the batch's digest and the subscription's
generation, so late writes of an older lineage are never read. A value is written once. Columns are deleted with their
batch, or else expire.
"""

import logging
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PayloadError, ProtocolError, WaitTimeout
from penstock.names import check_name
from penstock.payloads.format import PAYLOAD_TTL_S
from penstock.protocol import scripts
from penstock.records.causes import ColumnPending
from penstock.records.codec import count_shown, name_shown
from penstock.records.manifest import Row
from penstock.redis.commands import Client

if TYPE_CHECKING:
    from penstock.consumers.batch.fetch import PayloadReader
    from penstock.consumers.subscription.subscriber import Subscriber

log = logging.getLogger(__name__)

# Format of a value, one per row of a column:
#
#     offset 0    magic ``PSC1``
#     offset 4    kind (0: the writer had lost the payload, 1: per token, 2: per sample), dtype; one byte each, then two
#     offset 8    numbers per token: uint32, little endian; CRC-32 of what follows, begun with the row's index: uint32
#     offset 16   [length], [length, width] or [1] numbers, little endian
#
# Encoding and decoding neither block nor read Redis.

Array = NDArray[Any]

#: Largest value of one row, in bytes.
MAX_VALUE_BYTES = 256 * 1024 * 1024
#: Most numbers per token.
MAX_WIDTH = 65536

_HEADER = struct.Struct("<4sBBxxII")
_MAGIC = b"PSC1"
_DTYPES = [np.dtype(name).newbyteorder("<") for name in ("float16", "float32", "float64", "int8", "uint8", "int16",
                                                         "uint16", "int32", "int64")]  # fmt: skip
_LOST, _TOKEN, _SAMPLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Describe the layout of an array: a rank's complete share, or one micro-batch."""

    #: Index into ``all_rows`` of each row; -1 for a filler.
    rows: list[int]
    #: [B] tokens of each row in this layout; 1 if its payload is lost.
    lengths: list[int]
    #: True if rows are concatenated ([T]), False if they are padded ([B, L]).
    packed: bool = False

    @classmethod
    def of_micro(cls, micro: Mapping[str, Any]) -> "Layout":
        """Return the layout of a dict from ``Batch.packed`` or ``Batch.micro_batches``."""
        if not {"rows", "lengths"} <= micro.keys():
            raise ProtocolError(
                "micro must be a micro-batch: pass a dict from Batch.packed() or Batch.micro_batches()."
            )
        return cls(micro["rows"].tolist(), micro["lengths"].tolist(), "cu_seqlens" in micro)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the leading dimensions of a per-token array."""
        return (sum(self.lengths),) if self.packed else (len(self.lengths), max(self.lengths))


def split(array: Any, layout: Layout, lost: frozenset[int], batch: str, name: str) -> dict[int, bytes]:
    """Split an array (numpy or torch) with ``layout`` into values by row index, without fillers.

    ``lost``: rows whose payload this rank lost, which have no value.

    Raises:
        ProtocolError: the shape is neither per token nor per sample, or the dtype cannot be stored.
    """
    values = _to_numpy(array)
    dtype = values.dtype.newbyteorder("<")
    if values.dtype == np.bool_:
        values, dtype = values.view(np.uint8), np.dtype(np.uint8)
    if dtype not in _DTYPES:
        raise ProtocolError(
            f"column {name!r} has unsupported dtype {values.dtype}: convert it to one of "
            f"{', '.join(one.name for one in _DTYPES)}."
        )
    lead = layout.shape
    per_token = values.shape[: len(lead)] == lead and values.ndim <= len(lead) + 1
    if not per_token and values.shape != (len(layout.lengths),):
        raise ProtocolError(
            f"column {name!r} has shape {values.shape}: {batch} needs {list(lead)} or {[*lead, 'width']} per token, or "
            f"{[len(layout.lengths)]} per sample."
        )
    out: dict[int, bytes] = {}
    start = 0
    for i, (row, length) in enumerate(zip(layout.rows, layout.lengths, strict=True)):
        if row in lost:
            out[row] = _encode(np.zeros(0, np.float32), _LOST, row, name)
        elif row >= 0:
            of = values[i : i + 1] if not per_token else values[start : start + length] if layout.packed else (
                values[i, :length])  # fmt: skip
            out[row] = _encode(of.astype(dtype, copy=False), _TOKEN if per_token else _SAMPLE, row, name)
        start += length
    return out


def join(values: Mapping[int, bytes], layout: Layout, rows: Sequence[Row], lost: frozenset[int], name: str) -> Array:
    """Join values by row index into an array with ``layout``; 0 on padding, fillers and lost payloads.

    Raises:
        PayloadError: a value is damaged, has another length than its sample, or another kind than the other values.
    """
    decoded = {row: _decode(data, rows[row], row, name) for row, data in values.items()}
    kinds = {(kind, of.dtype, of.shape[1:]) for kind, of in decoded.values() if kind != _LOST}
    if len(kinds) > 1:
        raise PayloadError(f"column {name!r} mixes values per token and per sample, dtypes or widths: put one kind.")
    kind, dtype, width = kinds.pop() if kinds else (_SAMPLE, np.dtype(np.float32), ())
    if kind == _SAMPLE:
        out: Array = np.zeros(len(layout.rows), dtype)
        for i, row in enumerate(layout.rows):
            if row >= 0 and decoded[row][0] != _LOST:
                out[i] = decoded[row][1][0]
        return out
    out = np.zeros((*layout.shape, *width), dtype)
    start = 0
    for i, (row, length) in enumerate(zip(layout.rows, layout.lengths, strict=True)):
        if row >= 0 and row not in lost and decoded[row][0] != _LOST:
            target = out[start : start + length] if layout.packed else out[i, :length]
            target[...] = decoded[row][1]
        start += length
    return out


def rows_without_value(values: Mapping[int, bytes]) -> set[int]:
    """Return the rows whose payload the writer had lost, from values checked by ``join``."""
    return {row for row, data in values.items() if data[len(_MAGIC)] == _LOST}


def _encode(values: Array, kind: int, row: int, name: str) -> bytes:
    width = values.shape[1] if values.ndim > 1 else 0
    body = np.ascontiguousarray(values).tobytes()
    if width > MAX_WIDTH or len(body) > MAX_VALUE_BYTES:
        raise ProtocolError(
            f"column {name!r} has {width} numbers per token and {len(body)} bytes for one sample: at most {MAX_WIDTH} "
            f"and {MAX_VALUE_BYTES} are allowed."
        )
    code = _DTYPES.index(values.dtype.newbyteorder("<"))
    return _HEADER.pack(_MAGIC, kind, code, width, _checksum(body, row)) + body


def _decode(data: bytes, row: Row, index: int, name: str) -> tuple[int, Array]:
    """Check and decode one value; return its kind and array ([length], [length, width] or [1])."""
    what = f"column {name!r} of sample {row.sample}"
    if not _HEADER.size <= len(data) <= _HEADER.size + MAX_VALUE_BYTES:
        raise PayloadError(f"{what} has an invalid size of {len(data)} bytes.")
    magic, kind, code, width, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    most = 0 if kind == _SAMPLE else MAX_WIDTH
    if magic != _MAGIC or kind > _SAMPLE or code >= len(_DTYPES) or width > most:
        raise PayloadError(f"{what} has an invalid header.")
    if _checksum(body, index) != checksum:
        raise PayloadError(f"{what} is damaged: wrong checksum.")
    count = {_LOST: 0, _TOKEN: row.length * max(width, 1), _SAMPLE: 1}[kind]
    if len(body) != count * _DTYPES[code].itemsize:
        raise PayloadError(f"{what} has {len(body)} bytes, but a sample of {row.length} tokens needs {count} numbers.")
    values: Array = np.frombuffer(body, _DTYPES[code])
    return kind, values.reshape(-1, width) if width else values


def _checksum(body: "bytes | memoryview", row: int) -> int:
    return zlib.crc32(body, row)


def _to_numpy(array: Any) -> Array:
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # detects torch tensors without importing torch
        tensor = array.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        converted: Array = tensor.numpy()
        return converted
    return np.asarray(array)


#: Most columns of one batch, counted once per payload server with values.
MAX_COLUMNS = 256
#: Rows per round trip.
CHUNK = 128
#: First and longest pause before missing rows are read again, in seconds; pauses double.
POLL_S, MAX_POLL_S = 0.002, 0.05
#: Seconds between checks of the subscription's ownership during a wait.
CHECK_S = 0.5


class Store(Protocol):
    """Store the values of one batch by column and row."""

    def write(self, name: str, values: Mapping[int, bytes]) -> None: ...

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]: ...

    def report_lost(self, name: str, rows: Sequence[int]) -> None:
        """Report rows without a value, whose payloads the writer had lost."""


class LocalColumns:
    """Store the columns of a replayed batch in this process.

    Args:
        values: initial values by column and row.
    """

    def __init__(self, values: Mapping[str, Mapping[int, bytes]] | None = None) -> None:
        #: Values by column and row.
        self.values: dict[str, dict[int, bytes]] = {name: dict(of) for name, of in (values or {}).items()}

    def report_lost(self, name: str, rows: Sequence[int]) -> None:
        """Ignore lost payloads, which a replay does not count."""

    def write(self, name: str, values: Mapping[int, bytes]) -> None:
        self.values.setdefault(name, {}).update(values)

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the values of ``rows``; raise WaitTimeout at once if one is missing, as no other process writes."""
        held = self.values.get(name, {})
        if missing := [row for row in rows if row not in held]:
            raise WaitTimeout(
                f"Column {name!r} is missing for {len(missing)} of {len(rows)} rows: put it first in a replay.",
                count=len(rows) - len(missing),
                cause=ColumnPending(name, 0, len(missing), len(rows)),
            )
        return {row: held[row] for row in rows}


class RedisColumns:
    """Store the columns of one delivered batch in Redis. Not thread-safe.

    Args:
        subscriber: subscription of the batch, for announcements and waits.
        servers: connections to the payload servers.
        rows: rows of the complete batch.
        redone: True for a batch that all roles had committed before this role was restored: writes are ignored, and
        columns come from the lineage that committed the batch.
    """

    def __init__(
        self,
        subscriber: "Subscriber",
        servers: "PayloadReader",
        rows: Sequence[Row],
        n: int,
        digest: str,
        *,
        redone: bool = False,
    ) -> None:
        self._subscriber = subscriber
        self._servers = servers
        self._rows = rows
        self._n = n
        self._digest = digest
        self._redone = redone
        #: Generation in which the batch was delivered, until a rewind.
        self._gen = subscriber.gen

    def write(self, name: str, values: Mapping[int, bytes]) -> None:
        """Write values of this rank's rows. Blocks for two round trips. Idempotent for equal values.

        Raises:
            ProtocolError: the batch is committed or foreign, there are too many columns, or other values exist.
            OwnershipLost: the subscription was rewound or taken over.
        """
        if self._redone:
            return
        by_server = self._by_server(values)
        key = self._key(name, self._gen)
        self._announce(name, [(server, key) for server in by_server])
        for server, rows in by_server.items():
            for start in range(0, len(rows), CHUNK):
                part = {row: values[row] for row in rows[start : start + CHUNK]}
                call = scripts.write_column(key, PAYLOAD_TTL_S, part)
                other = self._servers.on_columns(server, partial(scripts.run, call=call))
                if other:
                    raise ProtocolError(
                        f"Column {name!r} of batch {self._n} already has another value for sample "
                        f"{self._rows[other[0]].sample}: use another name, as a column is written once."
                    )

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the values of ``rows``. Blocks until all are present, and reports missing ones.

        Raises WaitTimeout, OwnershipLost.
        """
        key = self._key(name, self._gen)
        found: dict[int, bytes] = {}
        waiting, deadline = self._subscriber.waiting, time.monotonic() + timeout_s
        pause_s, check_at = POLL_S, time.monotonic() + CHECK_S
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
                    f"{cause}, did not arrive within {timeout_s:g} s: check the role that puts it; the first missing "
                    f"value is for sample {self._rows[missing[0]].sample}.",
                    count=len(found),
                    cause=cause,
                )
            waiting.blocked_on(cause)
            if now > check_at:
                self._subscriber.ownership.check_lineage(self._gen)
                check_at = now + CHECK_S
            pause_s = POLL_S if len(found) > before else min(2 * pause_s, MAX_POLL_S)
            time.sleep(pause_s)
        waiting.end()
        return found

    def report_lost(self, name: str, rows: Sequence[int]) -> None:
        """Log and count rows whose payload the writer had lost. Blocks for one round trip."""
        subscriber = self._subscriber
        values = [f"{self._digest}/{name}/{row}" for row in rows]
        call = scripts.column_lost(subscriber.keys, subscriber.name, PAYLOAD_TTL_S, values)
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
                ttl_s=PAYLOAD_TTL_S,
                places=places,
            )
        )
        if answer == "owner":
            subscriber.ownership.check_lineage(self._gen)
        why = {
            "owner": "another trainer has taken over the subscription",
            "role": f"the subscription has no role {subscriber.seat.role!r}",
            "unknown": "the batch no longer exists",
            "diverged": "Redis has another batch of this number, as after a failover: rewind to a checkpoint",
            "committed": "this rank has committed the batch: put columns before the commit",
            "full": f"the batch already has {MAX_COLUMNS} columns",
        }.get(answer)
        if why is not None:
            raise ProtocolError(f"Column {name!r} cannot be put on batch {self._n} of {subscriber.name!r}: {why}.")

    def _fetch(self, server: str, key: str, rows: list[int]) -> dict[int, bytes]:
        def ask(client: Client) -> list[bytes | None]:
            return client.hmget(key, rows)

        values = self._servers.on_columns(server, ask)
        return {row: value for row, value in zip(rows, values, strict=True) if value is not None}

    def _newest_gen(self, name: str) -> int:
        """Return the generation that committed the batch, which is the last one that wrote columns."""
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
