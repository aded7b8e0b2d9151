"""A subscription from the trainer's side: own, request, read, commit, rewind.

    join ─> ask n ─> read manifest n ─> (train) ─> commit_batch n ─> checkpointed n
      └─ heartbeat keeps the ownership; losing it raises OwnershipLost at the next step, never a silent wait

Rank 0 owns; other ranks of the same trainer act under its token (ownership.py). There is one cursor, never one per
rank: every rank reads manifest n by its id (manifests.py).
"""

import logging
import time
from collections.abc import Sequence

from penstock.config.subscription import Definition
from penstock.consumers.subscription.manifests import Manifests
from penstock.consumers.subscription.ownership import Ownership
from penstock.consumers.subscription.rank import Seat, missing
from penstock.errors import ConfigError, ProtocolError
from penstock.names import check_name, new_token
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import RanksAbsent
from penstock.records.keys import Keys
from penstock.records.manifest import Row
from penstock.redis.control import Control

log = logging.getLogger(__name__)

#: The one process of a trainer.
ALONE = Seat()
#: Seconds between two checks whether other roles have caught up with this one.
AHEAD_S = 0.01


class Subscriber:
    """One rank's connection to a subscription.

    Args:
        url: control Redis.
        keys: the run.
        name: the subscription.
        seat: place of this process among the ranks and roles that train the subscription.
        definition: definition of the subscription, set by rank 0 when it joins; None keeps the existing one.
        model: name of the model whose clock a rewind reads; '' for those that publish nothing.
        job: identifies the ranks of one start of a trainer; a rank follows no owner of another job. '': unknown, then a
            rank that got a batch under one owner follows no other.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        name: str,
        *,
        seat: Seat = ALONE,
        definition: Definition | None = None,
        model: str = "",
        job: str = "",
    ) -> None:
        check_name("subscription", name)
        self.keys = keys
        self.name = name
        self.seat = seat
        self.model = model
        self._definition = definition
        self.control = Control(url)
        self.waiting = PublishedWaiting(self.control.client, keys, seat.who(name))
        #: Token and generation of this rank; the last committed batch, as far as it knows.
        self.ownership = Ownership(self.control, keys, name, seat, job, self.waiting)
        self._manifests = Manifests(self.control, keys, name, seat, self.ownership, self.waiting)
        #: Returns the manifest of a batch once it is cut; makes the error of a wait for one (``Manifests``).
        self.read, self.timeout = self._manifests.read, self._manifests.timeout

    @property
    def owner(self) -> str:
        """Return the token of the owner."""
        return self.ownership.token

    @property
    def gen(self) -> int:
        """Return the generation of the subscription; every rewind raises it."""
        return self.ownership.gen

    @property
    def cursor(self) -> int:
        """Return the last committed batch, as far as this rank knows."""
        return self.ownership.cursor

    def join(self, timeout_s: float | None = None) -> None:
        """Acquire the subscription; block while a dead owner's lease runs out, or (other ranks) until rank 0 owns it.

        Raises:
            ConfigError: another trainer with this name is alive, or the run is of another schema.
            WaitTimeout: ``timeout_s`` is over.
        """
        deadline = _deadline(timeout_s)
        self.control.call(scripts.check_schema(self.keys))
        if self.seat.leads:
            self.ownership.take(new_token(), deadline)
            if self._definition is not None:
                try:
                    self.define(self._definition)
                except ConfigError:
                    self.control.call(scripts.leave(self.keys, self.name, self.owner))
                    raise
            self.ownership.keep()
        else:
            self.ownership.follow(deadline, alive=True)
        self.waiting.end()

    def join_if_free(self) -> bool:
        """Acquire the subscription unless another trainer holds it; return whether it did. Blocks for a round trip.

        Raises ConfigError: the run is of another schema, or the subscription was dropped.
        """
        self.control.call(scripts.check_schema(self.keys))
        if is_taken := self.ownership.take_if_free(new_token()):
            self.ownership.keep()
        return is_taken

    def define(self, definition: Definition) -> None:
        """Set the subscription's definition; waiting groups are judged again. Blocks for one round trip."""
        self.control.call(scripts.subscribe(self.keys, self.name, definition.fields()))

    def await_driver(self, timeout_s: float | None = None) -> None:
        """Block until the driving role has begun (``Ownership.await_driver``). Raises WaitTimeout."""
        self.ownership.await_driver(_deadline(timeout_s))

    def leave(self) -> None:
        """Release the ownership, so that the next trainer need not wait. Blocks shortly."""
        self.ownership.stop()
        self.waiting.end()
        self.ownership.give_back()
        self.control.close()
        self._manifests.close()

    def ask(self, n: int) -> None:
        """Request batch ``n``. Raises OwnershipLost."""
        while not self.control.call(scripts.ask(self.keys, self.name, n, self.owner, self.gen)):
            self.ownership.refollow()

    def commit(self, n: int, digest: str, *, behind: int | None = None) -> tuple[str, ...]:
        """Commit batch ``n`` for this rank; return the ranks that have not committed it yet.

        Idempotent. Blocks for one round trip; with roles also until others have caught up with this rank.

        Args:
            behind: the last batch that this rank committed; None: unknown.

        Raises:
            OwnershipLost, ProtocolError.
        """
        waited = False
        while (answer := self._commit(n, digest)).outcome == "owner" or self._is_ahead(n, behind, answer):
            if answer.outcome == "owner":
                self.ownership.refollow()
                continue
            waited = True
            self.waiting.blocked_on(RanksAbsent(missing(self.seat, answer.bits), "commit", answer.cursor + 1))
            time.sleep(AHEAD_S)
        if waited:
            self.waiting.end()
        if answer.outcome in ("committed", "waiting", "already"):
            self.ownership.cursor = max(self.cursor, answer.cursor)
            self.ownership.bound = True
            return missing(self.seat, answer.bits) if answer.outcome == "waiting" else ()
        order = f"the batch to be committed next is {answer.cursor + 1}"
        if answer.cursor < self.cursor:
            order = (
                f"Redis knows {answer.cursor} committed batches, and this trainer committed {self.cursor}: it lost "
                "some, as after a failover; restore the last checkpoint"
            )
        why = {
            "order": order,
            "unknown": "no such batch was cut, or Redis lost it, as after a failover: restore the last checkpoint",
            "diverged": "Redis holds another batch of this number, as after a failover: rewind to a checkpoint",
            "role": f"the subscription has no role {self.seat.role!r}: give every trainer of it the same roles",
        }[answer.outcome]
        raise ProtocolError(f"Batch {n} of subscription {self.name!r} cannot be committed: {why}.")

    def _is_ahead(self, n: int, behind: int | None, answer: scripts.BatchCommit) -> bool:
        """Return whether this role has committed all before ``n``, and others have not: then it waits for them.

        Roles train independently (T13); the ranks of a single role go in step (T14), so there it is an error.
        """
        is_next = behind == n - 1 and self.cursor <= answer.cursor < n - 1
        return bool(self.seat.roles) and answer.outcome == "order" and is_next

    def _commit(self, n: int, digest: str) -> scripts.BatchCommit:
        call = scripts.commit_batch(
            self.keys,
            self.name,
            owner=self.owner,
            gen=self.gen,
            n=n,
            digest=digest,
            rank=self.seat.rank,
            ranks=self.seat.ranks,
            role=self.seat.role,
        )
        return self.control.call(call)

    def lost(self, rows: Sequence[Row]) -> None:
        """Count lost payloads of these samples once. Blocks for one round trip."""
        new = self.control.call(scripts.lost(self.keys, [(row.job, row.k, row.token) for row in rows]))
        if new:
            log.warning("%d payloads are lost, including sample %s; they bear no loss", len(new), new[0])

    def checkpointed(self, n: int) -> None:
        """Report batches up to ``n`` as durable; older groups may retire. Raises OwnershipLost, ProtocolError."""
        call = scripts.checkpointed(self.keys, self.name, owner=self.owner, gen=self.gen, n=n, role=self.seat.role)
        done = self.control.call(call)
        if done == 0:
            raise self.ownership.not_ours()
        if done < 0:
            raise ProtocolError(f"Batch {n} of subscription {self.name!r} is not committed, so nothing of it is safe.")

    def rewind(self, n: int) -> None:
        """Deliver every batch after ``n`` again; a rank that does not lead only rewinds itself.

        Raises OwnershipLost, ProtocolError (too far back, or ahead).
        """
        if not self.seat.leads:
            self.ownership.cursor = n
            return
        call = scripts.rewind(self.keys, self.name, owner=self.owner, gen=self.gen, n=n, model=self.model)
        answer = self.control.call(call)
        if answer.outcome == "rewound":
            self.ownership.begin(answer.gen, n)
            return
        if answer.outcome == "owner":
            # The reply of the first try may have been lost.
            if not self.ownership.regain(n):
                raise self.ownership.not_ours()
            return
        if answer.outcome == "floor":
            raise ProtocolError(
                f"Subscription {self.name!r} cannot go back to batch {n}: batches up to {answer.limit} are retired. "
                "Restore a newer checkpoint."
            )
        raise ProtocolError(
            f"The checkpoint is at batch {n}, but Redis knows only {answer.limit} committed batches of subscription "
            f"{self.name!r}: it lost some, as after a failover or with another server. Restore an older checkpoint."
        )


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s
