"""Read and check the manifests of a subscription on one rank, with reported waits.

Every rank reads manifest n by its id, so that all ranks share one cursor. During a wait a rank checks whether the
manifest can still arrive: the data may have ended, Redis may have lost a commit, or another trainer may have taken
over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.config import Config
from penstock.config.subscription import Definition, Unit
from penstock.consumers.subscription.ownership import Ownership
from penstock.consumers.subscription.rank import Seat
from penstock.errors import ConfigError, DataEnded, ProtocolError, WaitTimeout
from penstock.protocol.position import read_count
from penstock.protocol.waits import Waiting, read_wait
from penstock.records.causes import BatchNotCut
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.worker_causes import NotReported
from penstock.redis.commands import Client
from penstock.redis.connect import connect_blocking
from penstock.redis.control import Control
from penstock.system.garbage_collection import collecting_later


def with_groups(config: Config, batch_groups: int | None) -> Config:
    """Return ``config`` with another number of groups per batch; None: unchanged."""
    if batch_groups is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_groups": batch_groups})})


def check_groups(batch_groups: int | None, definition: Definition) -> None:
    """Raise ConfigError if the argument contradicts the size of a subscription."""
    if batch_groups is not None and (definition.size, definition.unit) != (batch_groups, Unit.GROUPS):
        raise ConfigError(
            f"Trainer(batch_groups={batch_groups}) contradicts its subscription, whose batches have {definition.size} "
            f"{definition.unit}: omit batch_groups, or the size of the subscription."
        )


#: Longest blocking read in seconds, which bounds the delay of stops, lost ownership and timeouts.
BLOCK_S = 0.5


@dataclass(frozen=True, slots=True)
class Delivery:
    """Hold a manifest and its digest."""

    manifest: Manifest
    digest: str


class Manifests:
    """Read the manifests of subscription ``name`` over a separate connection, which reads block.

    Args:
        control: connection for all other calls.
        ownership: ownership of this rank, bound by the first manifest (T14).
        waiting: reports the awaited batch.
    """

    def __init__(
        self, control: Control, keys: Keys, name: str, seat: Seat, ownership: Ownership, waiting: Waiting
    ) -> None:
        self._control = control
        self._keys = keys
        self._name = name
        self._seat = seat
        self._ownership = ownership
        self._waiting = waiting
        self._reader: Client = connect_blocking(control.url, BLOCK_S)

    def close(self) -> None:
        self._reader.close()

    def read(
        self,
        n: int,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        *,
        ahead: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Delivery:
        """Return the manifest of batch ``n``; block until it is cut.

        Raises WaitTimeout, DataEnded, OwnershipLost, ProtocolError. ``ahead`` marks a prefetch, whose wait is not
        reported. ``on_wait`` is called repeatedly during the wait.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._ownership.check()
            left = deadline - time.monotonic()
            block_ms = int(max(1.0, min(BLOCK_S, left) * 1000))
            found = self._control.do(partial(self._xread, n, block_ms))
            if found and found[0][1]:
                self._ownership.bind()
                if not ahead:
                    self._waiting.end()
                return self._delivery(n, *found[0][1][0])
            self._check_lost()
            self._check_ended(n)
            on_wait()
            if not self._seat.drives:
                self._ownership.check_lineage(self._ownership.gen)
            if not ahead:
                self._waiting.blocked_on(BatchNotCut(self._name, n))
            if stopped():
                raise self.timeout(f"The wait for batch {n} of subscription {self._name!r} was stopped")
            if left <= 0:
                raise self.timeout(f"Batch {n} of subscription {self._name!r} did not arrive within {timeout_s} s")

    def timeout(self, what: str) -> WaitTimeout:
        """Return the timeout error of a wait for a batch, with the buffer's reason. Blocks for one or two round trips.

        Args:
            what: start of the error message.
        """
        wait = self._control.do(partial(read_wait, keys=self._keys, who=f"buffer:{self._name}"))
        if wait is None:
            ready = self._control.do(lambda client: client.zcard(self._keys.ready))
            cause = NotReported()
            return WaitTimeout(f"{what}: {ready} groups are ready, and {cause}.", count=ready, cause=cause)
        counts = "" if wait.count is None else f"{wait.count} of {wait.needed} are ready, and "
        return WaitTimeout(f"{what}: {counts}the buffer waits for {wait.cause}.", count=wait.count, cause=wait.cause)

    def _check_lost(self) -> None:
        """Raise ProtocolError if Redis lost a commit of this trainer, so that the batch would never arrive."""
        # Read first, because the trainer commits and rewinds concurrently with the prefetch thread.
        known = (self._ownership.gen, self._ownership.cursor)
        gen, cursor = self._control.do(lambda client: client.hmget(self._keys.sub(self._name), "gen", "cursor"))
        where = (read_count(gen, "gen", self._name), read_count(cursor, "cursor", self._name))
        if where < known:
            raise ProtocolError(
                f"Redis has {where[1]} committed batches of subscription {self._name!r}, but this trainer committed "
                f"{known[1]}: Redis lost acknowledged writes, as in a failover. Restore the last checkpoint."
            )

    def _check_ended(self, n: int) -> None:
        """Raise DataEnded if batch ``n`` is after the last batch, on which all ranks agree."""
        found = self._control.do(lambda client: client.hget(self._keys.sub(self._name), "ended"))
        ended = read_count(found, "ended", self._name)
        if 0 < ended <= n:
            self._waiting.end()
            raise DataEnded(
                f"The data of run {self._keys.run!r} has ended: the last batch of subscription {self._name!r} was "
                f"{ended - 1}. Raise data.epochs and restart to continue."
            )

    def _xread(self, n: int, block_ms: int, _: Client) -> Any:
        return self._reader.xread({self._keys.batches(self._name): f"{n - 1}-0"}, count=1, block=block_ms)

    def _delivery(self, n: int, entry: bytes, fields: dict[bytes, bytes]) -> Delivery:
        if entry != b"%d-0" % n:
            raise ProtocolError(
                f"Batch {n} of subscription {self._name!r} is gone (the next is {entry.decode()}), because the "
                "checkpoint is older than the batches that the buffer keeps: restore a newer checkpoint."
            )
        data = fields.get(b"m", b"")
        digest = Manifest.digest(data)
        if digest.encode() != fields.get(b"dg"):
            raise ProtocolError(f"The manifest of batch {n} of subscription {self._name!r} is damaged: wrong digest.")
        with collecting_later():
            return Delivery(Manifest.from_bytes(data, f"manifest {n} of {self._name}"), digest)
