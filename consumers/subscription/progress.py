"""Progress of one process: batches that its weights were trained on, committed batches, and checkpointed ones.

commit n ─> state (batch n) ─> the file is on disk ─> checkpointed n: what is older may go
   ^                                 │
   └──── go_back n: batches after n come again ───┘
"""

import time
from collections.abc import Mapping
from typing import Any

from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import ConfigError, ProtocolError, RolesApart, WaitTimeout
from penstock.protocol.position import read_count
from penstock.records.causes import RanksAbsent

#: Seconds between two checks of the other ranks' commits.
LOOK_S = 0.005
#: Longest wait of a checkpoint for the other ranks' commits.
CHECKPOINT_TIMEOUT_S = 600.0


class Progress:
    """Progress of one rank on its subscription; not thread-safe."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        #: Last batch that the weights of this process were trained on.
        self.position = 0
        #: Last batch that was cut before the last rewind: it keeps the version of its first delivery.
        self.redelivered = 0
        #: Batches up to this one were committed by all roles before this one was restored to an older one.
        self.redone = 0
        #: Number and digest of the batch that was committed last.
        self._committed: tuple[int, str] | None = None
        #: Batch that the last ``state`` named.
        self._stated: int | None = None
        #: True once ``go_back`` said where the weights are.
        self._restored = False
        #: False until a role that follows knows where the driving one continues.
        self._begun = subscriber.seat.drives

    @property
    def committed(self) -> int:
        """Return the batch that was committed last, by this rank if it has committed any."""
        return self._committed[0] if self._committed is not None else self._subscriber.cursor

    def join(self) -> None:
        """Acquire the subscription, after its last committed batch. Blocks and raises as ``Subscriber.join``."""
        self._subscriber.join()
        self.position = self._subscriber.cursor

    def begin(self, timeout_s: float | None) -> bool:
        """Continue, in a role that follows, from its own weights, once the driving role has rewound (T13).

        Returns True if it started just now. Blocks until the driving role has requested a batch. Raises RolesApart,
        WaitTimeout.
        """
        if self._begun:
            return False
        self._subscriber.await_driver(timeout_s)
        cursor, seat = self._subscriber.cursor, self._subscriber.seat
        if self.position > cursor:
            raise RolesApart(
                cursor,
                f"Role {seat.role} has trained batch {self.position}, but role {seat.roles[0]} continues from "
                f"batch {cursor}: restore a checkpoint of batch {cursor} or before.",
            )
        if not self._restored:
            self.position = cursor
        self.redone = cursor
        self._begun = True
        return True

    def commit(self, n: int, digest: str) -> None:
        """Commit batch ``n`` for this rank. Blocks and raises as ``Subscriber.commit``."""
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
                    f"Not every rank committed batch {n} in {timeout_s:g} s: one is dead or stuck "
                    f"({', '.join(others)}).",
                    cause=cause,
                )
            time.sleep(LOOK_S)
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
        """Return whether Redis has committed batch ``n`` and its successors. Blocks for one round trip."""
        name = self._subscriber.name
        sub = self._subscriber.keys.sub(name)
        floor, cursor = self._subscriber.control.do(lambda client: client.hmget(sub, "floor", "cursor"))
        return read_count(floor, "floor", name) <= n <= read_count(cursor, "cursor", name)

    def go_back(self, n: int) -> None:
        """Rewind to weights trained up to batch ``n``: its successors are delivered again.

        A role that follows rewinds no other. Raises ProtocolError if the buffer no longer has the batches.
        """
        self._committed = None
        self.position, self._restored = n, True
        if not self._subscriber.seat.drives:
            self._begun = False
            return
        self._subscriber.rewind(n)
        # From the rewind to the next publication nothing is cut.
        sub = self._subscriber.keys.sub(self._subscriber.name)
        cut = self._subscriber.control.do(lambda client: client.hget(sub, "cut"))
        self.redelivered = read_count(cut, "cut", self._subscriber.name)


def batch_of(state: Mapping[str, Any], run: str, name: str) -> int:
    """Return the batch of a checkpoint's ``state``. Raises ConfigError if it is not of this subscription."""
    if (state.get("run"), state.get("subscription")) != (run, name):
        raise ConfigError(
            f"The checkpoint is of subscription {state.get('subscription')!r} of run {state.get('run')!r}, "
            f"not of {name!r} of {run!r}."
        )
    if not isinstance(state.get("batch"), int):
        raise ConfigError(
            f"The checkpoint does not say at which batch it was made (batch is {state.get('batch')!r}): give what "
            "Trainer.state_dict() returned."
        )
    return int(state["batch"])
