"""Make one rank's batch from a manifest, with payloads from the servers and a store for columns."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.config import Config
from penstock.consumers.batch import recording
from penstock.consumers.batch.batch import Batch, rank_rows
from penstock.consumers.batch.columns import RedisColumns, Store
from penstock.consumers.batch.fetch import Bytes, PayloadReader
from penstock.consumers.batch.token_arrays import SIDE_KEYS
from penstock.consumers.subscription.agreement import Circle, meet
from penstock.consumers.subscription.manifests import Delivery
from penstock.consumers.subscription.rank import Seat
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import RanksAbsent
from penstock.records.manifest import Manifest, Row, first_rows
from penstock.system.disk import until_room


def check_reading(config: Config, seat: Seat, replica_group: Any) -> None:
    """Raise ConfigError if ``debug.save_batches`` lacks separate files per rank, or the replica group is wrong."""
    if config.debug.save_batches is not None:
        recording.check_template(config.debug.save_batches, seat.dp_size)
    if replica_group is not None:
        from penstock.consumers.batch.broadcast import check_group

        check_group(replica_group, seat.replica, seat.num_replicas)


class BatchReader:
    """Read this rank's batches. Use from one thread at a time; columns of batches may be used by another thread.

    Args:
        subscriber: connection to the subscription, whose seat determines this rank's rows.
        replica_group: torch.distributed group (gloo) of the replicas of this dp_rank: the first reads payloads and
            broadcasts them. None: every replica reads.
        prepare: called with each batch to compute ``batch.prepared``.
    """

    def __init__(
        self,
        config: Config,
        subscriber: Subscriber,
        *,
        replica_group: Any = None,
        prepare: Callable[[Batch], Any] | None = None,
    ) -> None:
        self._config = config
        self._subscriber = subscriber
        self._seat = subscriber.seat
        self._replica_group = replica_group
        self._prepare = prepare
        # Separate from the trainer's wait, because the prefetch thread reads too.
        who = f"{subscriber.seat.who(subscriber.name)}/reading"
        self._payloads = PayloadReader(
            config.redis, waiting=PublishedWaiting(subscriber.control.client, subscriber.keys, who)
        )
        #: Separate connections, because the prefetch thread reads payloads.
        self._columns = PayloadReader(config.redis, subscriber.keys)

    def read(self, delivery: Delivery, *, redone: bool = False, deadline_s: float = math.inf) -> Batch:
        """Make the batch of ``delivery``. Blocks until its payloads are read; missing ones count as lost.

        Args:
            redone: all roles had committed the batch before this role was restored, so its columns exist.
            deadline_s: time (monotonic) at which an unresponsive payload server raises WaitTimeout.
        """
        manifest, digest = delivery.manifest, delivery.digest
        rows = first_rows(rank_rows(manifest, self._seat.dp_rank, self._seat.dp_size))
        payloads = self._read_payloads(manifest.n, rows, deadline_s)
        missing = [row for row in rows if payloads[row.payload_id] is None]
        if missing:
            self._subscriber.lost(missing)
        return Batch(
            manifest,
            digest=digest,
            payloads=payloads,
            dp_rank=self._seat.dp_rank,
            dp_size=self._seat.dp_size,
            advantage=self._config.trainer.advantage,
            read_sides=partial(self._payloads.read_sides, self._subscriber.keys),
            max_staleness=self._config.trainer.max_token_staleness,
            store=self._store(delivery, payloads, redone),
        )

    def prepare(self, batch: Batch) -> Batch:
        """Set ``batch.prepared`` with the caller's function; return the batch."""
        if self._prepare is not None:
            batch.prepared = self._prepare(batch)
        return batch

    def close(self) -> None:
        self._payloads.close()
        self._columns.close()

    def _store(self, delivery: Delivery, payloads: dict[str, Bytes | None], redone: bool) -> Store:
        """Return the store for a batch's columns: Redis, and the recording if enabled."""
        manifest, seat = delivery.manifest, self._seat
        store = RedisColumns(
            self._subscriber,
            self._columns,
            manifest.samples(),
            manifest.n,
            delivery.digest,
            redone=redone,
        )
        template = self._config.debug.save_batches
        if template is None or seat.replica or not seat.drives:
            return store
        rank, size, whole = seat.dp_rank, seat.dp_size, payloads | self._read_sides(manifest, payloads)
        file = until_room(
            lambda: recording.save(template, manifest, delivery.digest, whole, rank=rank, size=size),
            blocked_on=self._subscriber.waiting.blocked_on,
        )
        return recording.RecordedColumns(store, file)

    def _read_sides(self, manifest: Manifest, payloads: Mapping[str, Bytes | None]) -> dict[str, Bytes | None]:
        """Read images and side arrays that are token keys of rows with payloads, named as in a recording."""
        rows = [row for row in first_rows(manifest.samples()) if payloads.get(row.payload_id) is not None]
        return {
            recording.side_key(sample, name): data
            for name in (*SIDE_KEYS, PIXEL_VALUES, IMAGE_GRID)
            for sample, data in self._payloads.read_sides(self._subscriber.keys, rows, name).items()
        }

    def _read_payloads(self, n: int, rows: list[Row], deadline_s: float) -> dict[str, Bytes | None]:
        subscriber, seat = self._subscriber, self._seat
        if self._replica_group is None or seat.num_replicas == 1:
            return self._payloads.read(subscriber.keys, rows, deadline_s)
        from penstock.consumers.batch.broadcast import share

        circle = Circle(
            f"{seat.role}#{seat.dp_rank}", seat.replica, seat.num_replicas, seat, seat.dp_rank * seat.num_replicas
        )
        # Separate from the trainer's wait, because the prefetch thread runs this too.
        waiting = PublishedWaiting(subscriber.control.client, subscriber.keys, f"{seat.who(subscriber.name)}/payloads")
        timeout_s = self._config.trainer.rank_timeout_s
        meet(subscriber, waiting, circle, n, "", RanksAbsent((), "payloads", n), timeout_s)
        return share(self._replica_group, rows, lambda wanted: self._payloads.read(subscriber.keys, wanted))
