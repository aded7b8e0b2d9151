"""Track the progress of one process: trained, committed and checkpointed batches.

commit n ─> state (batch n) ─> the file is on disk ─> checkpointed n: older batches may be deleted
   ^                                 │
   └─ go_back n: batches after n are redelivered ─┘
"""

import time
from collections.abc import Mapping
from typing import Any

from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import ConfigError, ProtocolError, RolesApart, WaitTimeout
from penstock.protocol.position import read_count
from penstock.records.causes import RanksAbsent

#: Seconds between checks of the other ranks' commits.
POLL_S = 0.005
#: Longest wait of a checkpoint for the other ranks' commits, in seconds.
CHECKPOINT_TIMEOUT_S = 600.0


class Progress:
    """Track the progress of one rank on its subscription. Not thread-safe."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        #: Last batch on which this process's weights were trained.
        self.position = 0
        #: Last batch cut before the last rewind; batches up to it keep the version of their first delivery.
        self.redelivered = 0
        #: Last batch that all roles had committed before this role was restored to an older batch.
        self.redone = 0
        #: Number and digest of the last committed batch.
        self._committed: tuple[int, str] | None = None
        #: Batch of the last ``state``.
        self._stated: int | None = None
        #: True once ``go_back`` has set the batch of the weights.
        self._restored = False
        #: False until a non-driving role knows the batch from which the driving role continues.
        self._begun = subscriber.seat.drives

    @property
    def committed(self) -> int:
        """Return the last batch committed by this rank, or by the subscription if this rank committed none."""
        return self._committed[0] if self._committed is not None else self._subscriber.cursor

    def join(self) -> None:
        """Acquire the subscription at its last committed batch. Blocks and raises like ``Subscriber.join``."""
        self._subscriber.join()
        self.position = self._subscriber.cursor

    def begin(self, timeout_s: float | None) -> bool:
        """Start a non-driving role from its own weights once the driving role has rewound (T13).

        Return True if the role started now. Blocks until the driving role has requested a batch. Raises RolesApart,
        WaitTimeout.
        """
        if self._begun:
            return False
        self._subscriber.await_driver(timeout_s)
        cursor, seat = self._subscriber.cursor, self._subscriber.seat
        if self.position > cursor:
            raise RolesApart(
                cursor,
                f"Role {seat.role} was restored at batch {self.position}, but role {seat.roles[0]} continues from "
                f"batch {cursor}: restore a checkpoint of batch {cursor} or before.",
            )
        if not self._restored:
            self.position = cursor
        self.redone = cursor
        self._begun = True
        return True

    def commit(self, n: int, digest: str) -> None:
        """Commit batch ``n`` for this rank. Blocks and raises like ``Subscriber.commit``."""
        self._subscriber.commit(n, digest, behind=self.position)
        self._committed = (n, digest)
        self.position = n

    def await_ranks(self, timeout_s: float) -> int:
        """Block until every rank has committed the last batch; return its number. Raises WaitTimeout, OwnershipLost."""
        if self._committed is None:
            return self._subscriber.cursor
        n, digest = self._committed
        deadline = time.monotonic() + timeout_s
        while others := self._subscriber.commit(n, digest):
            self._subscriber.ownership.check()
            cause = RanksAbsent(others, "commit", n)
            self._subscriber.waiting.blocked_on(cause)
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"Not every rank committed batch {n} within {timeout_s:g} s: check {', '.join(others)}.",
                    cause=cause,
                )
            time.sleep(POLL_S)
        self._subscriber.waiting.end()
        return n

    def state(self) -> int:
        """Return the batch of a checkpoint taken now."""
        self._stated = self.position
        return self.position

    def checkpointed(self) -> None:
        """Report that the checkpoint of the last ``state`` is durable, see ``Trainer.checkpointed``."""
        if self._stated is None:
            raise ProtocolError("Call state_dict() and save it before checkpointed().")
        if self._subscriber.seat.rank == 0:
            self.await_ranks(CHECKPOINT_TIMEOUT_S)
            self._subscriber.checkpointed(self._stated)

    def can_go_back(self, n: int) -> bool:
        """Return whether Redis has the commit of batch ``n`` and its successors. Blocks for one round trip."""
        name = self._subscriber.name
        sub = self._subscriber.keys.sub(name)
        floor, cursor = self._subscriber.control.do(lambda client: client.hmget(sub, "floor", "cursor"))
        return read_count(floor, "floor", name) <= n <= read_count(cursor, "cursor", name)

    def go_back(self, n: int) -> None:
        """Rewind to weights trained up to batch ``n``; later batches are delivered again.

        A role that does not drive the clock rewinds only itself. Raises ProtocolError if the buffer no longer has the
        batches.
        """
        self._committed = None
        self.position, self._restored = n, True
        if not self._subscriber.seat.drives:
            self._begun = False
            return
        self._subscriber.rewind(n)
        # No batch is cut between the rewind and the next publication.
        sub = self._subscriber.keys.sub(self._subscriber.name)
        cut = self._subscriber.control.do(lambda client: client.hget(sub, "cut"))
        self.redelivered = read_count(cut, "cut", self._subscriber.name)


def batch_of(state: Mapping[str, Any], run: str, name: str) -> int:
    """Return the batch of a checkpoint's ``state``. Raises ConfigError if it belongs to another subscription."""
    if (state.get("run"), state.get("subscription")) != (run, name):
        raise ConfigError(
            f"The checkpoint belongs to subscription {state.get('subscription')!r} of run {state.get('run')!r}, "
            f"not to {name!r} of {run!r}: use a checkpoint of this subscription."
        )
    if not isinstance(state.get("batch"), int):
        raise ConfigError(
            f"The checkpoint has no valid batch (batch is {state.get('batch')!r}): pass the result of "
            "Trainer.state_dict()."
        )
    return int(state["batch"])
