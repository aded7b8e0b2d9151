"""Use a subscription from a trainer: own, request, read, commit, rewind.

    join ─> ask n ─> read manifest n ─> (train) ─> commit_batch n ─> checkpointed n
      └─ a heartbeat keeps the ownership; a loss raises OwnershipLost at the next step

Rank 0 owns; other ranks of the trainer use its token (ownership.py). All ranks share one cursor: every rank reads
manifest n by its id (manifests.py).
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

#: Seat of a single-process trainer.
ALONE = Seat()
#: Seconds between checks whether other roles have caught up.
AHEAD_S = 0.01


class Subscriber:
    """Connect one rank to a subscription.

    Args:
        url: address of the control Redis.
        keys: key names of the run.
        name: name of the subscription.
        seat: place of this process among the ranks and roles that train the subscription.
        definition: definition of the subscription, which rank 0 sets when it joins; None keeps the existing one.
        model: name of the model whose clock a rewind reads; '' if the trainer does not publish.
        job: identifies the ranks of one launch; see ``Ownership``.
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
        #: Token, generation, and last committed batch known to this rank.
        self.ownership = Ownership(self.control, keys, name, seat, job, self.waiting)
        self._manifests = Manifests(self.control, keys, name, seat, self.ownership, self.waiting)
        #: Read a manifest once it is cut; create the error of such a wait (``Manifests``).
        self.read, self.timeout = self._manifests.read, self._manifests.timeout

    @property
    def owner(self) -> str:
        """Return the token of the owner."""
        return self.ownership.token

    @property
    def gen(self) -> int:
        """Return the generation of the subscription, which every rewind increments."""
        return self.ownership.gen

    @property
    def cursor(self) -> int:
        """Return the last committed batch known to this rank."""
        return self.ownership.cursor

    def join(self, timeout_s: float | None = None) -> None:
        """Acquire the subscription. Blocks while a dead owner's lease runs out, or (other ranks) until rank 0 owns it.

        Raises:
            ConfigError: another trainer with this name is alive, or the run has another schema.
            WaitTimeout: the call timed out after ``timeout_s``.
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
        """Acquire the subscription unless another trainer owns it; return whether it succeeded. Blocks for a round
        trip.

        Raises ConfigError if the run has another schema, or the subscription was dropped.
        """
        self.control.call(scripts.check_schema(self.keys))
        if is_taken := self.ownership.take_if_free(new_token()):
            self.ownership.keep()
        return is_taken

    def define(self, definition: Definition) -> None:
        """Set the subscription's definition, which filters waiting groups again. Blocks for one round trip."""
        self.control.call(scripts.subscribe(self.keys, self.name, definition.fields()))

    def await_driver(self, timeout_s: float | None = None) -> None:
        """Block until the driving role has begun (``Ownership.await_driver``). Raises WaitTimeout."""
        self.ownership.await_driver(_deadline(timeout_s))

    def leave(self) -> None:
        """Release the ownership for the next trainer. Blocks briefly."""
        self.ownership.stop()
        self.waiting.end()
        self.ownership.release()
        self.control.close()
        self._manifests.close()

    def ask(self, n: int) -> None:
        """Request batch ``n``. Raises OwnershipLost."""
        while not self.control.call(scripts.ask(self.keys, self.name, n, self.owner, self.gen)):
            self.ownership.refollow()

    def commit(self, n: int, digest: str, *, behind: int | None = None) -> tuple[str, ...]:
        """Commit batch ``n`` for this rank; return the ranks that have not committed it yet.

        Idempotent. Blocks for one round trip, and with roles until other roles have caught up.

        Args:
            behind: last batch that this rank committed; None if unknown.

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
        order = f"the next batch to commit is {answer.cursor + 1}"
        if answer.cursor < self.cursor:
            order = (
                f"Redis has {answer.cursor} committed batches, but this trainer committed {self.cursor}: Redis lost "
                "some, as in a failover; restore the last checkpoint"
            )
        why = {
            "order": order,
            "unknown": "it was not cut, or Redis lost it, as in a failover: restore the last checkpoint",
            "diverged": "Redis has another batch of this number, as in a failover: rewind to a checkpoint",
            "role": f"the subscription has no role {self.seat.role!r}: pass the same roles to all its trainers",
        }[answer.outcome]
        raise ProtocolError(f"Batch {n} of subscription {self.name!r} cannot be committed: {why}.")

    def _is_ahead(self, n: int, behind: int | None, answer: scripts.BatchCommit) -> bool:
        """Return whether this role has committed all batches before ``n`` but others have not, and so must wait.

        Roles train independently (T13), but the ranks of a role train in step (T14), so this is an error within a role.
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
        """Count the lost payloads of these samples once. Blocks for one round trip."""
        new = self.control.call(scripts.lost(self.keys, [(row.job, row.k, row.token) for row in rows]))
        if new:
            log.warning("lost %d payloads, including sample %s; they bear no loss", len(new), new[0])

    def checkpointed(self, n: int) -> None:
        """Report batches up to ``n`` as durable; their groups may retire. Raises OwnershipLost, ProtocolError."""
        call = scripts.checkpointed(self.keys, self.name, owner=self.owner, gen=self.gen, n=n, role=self.seat.role)
        done = self.control.call(call)
        if done == 0:
            raise self.ownership.not_ours()
        if done < 0:
            raise ProtocolError(
                f"Batch {n} of subscription {self.name!r} is not committed: commit it before a checkpoint."
            )

    def rewind(self, n: int) -> None:
        """Rewind to batch ``n``, so that later batches are delivered again; non-leader ranks rewind only themselves.

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
            # The reply to the first attempt may have been lost.
            if not self.ownership.regain(n):
                raise self.ownership.not_ours()
            return
        if answer.outcome == "floor":
            raise ProtocolError(
                f"Subscription {self.name!r} cannot rewind to batch {n}, because batches up to {answer.limit} are "
                "retired: restore a newer checkpoint."
            )
        raise ProtocolError(
            f"The checkpoint is at batch {n}, but Redis has only {answer.limit} committed batches of subscription "
            f"{self.name!r}: Redis lost some, as in a failover or with another server. Restore an older checkpoint."
        )


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s
