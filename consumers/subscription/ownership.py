"""Own a subscription: rank 0 of a trainer holds the lease, and the other ranks use its token.

    rank 0        take ─> keep: a thread renews the lease ─> stop ─> release
    other ranks   follow rank 0 of their job ─> bind at the first batch ─> refollow after a rewind of rank 0

Every rewind increments the generation. A rank that lost the subscription gets OwnershipLost at its next step instead of
a silent wait.
"""

import logging
import threading
import time

from penstock.consumers.subscription.rank import Seat
from penstock.errors import ConfigError, OwnershipLost, QueueUnavailable, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.position import read_count
from penstock.protocol.waits import Waiting
from penstock.records.cause import Cause
from penstock.records.causes import RankNotJoined, RoleNotStarted
from penstock.records.codec import name_shown
from penstock.records.keys import Keys
from penstock.records.worker_causes import LeaseHeld
from penstock.redis.commands import Client
from penstock.redis.control import PASSING, Control

log = logging.getLogger(__name__)

#: Duration in seconds of the lease, which the leader rank renews.
OWNER_LEASE_S = 6.0
#: Remaining time in ms above which a lease was renewed recently by a live owner.
FRESH_MS = int(1000 * OWNER_LEASE_S) - 500


class Ownership:
    """Hold the token and generation with which one rank acts on a subscription.

    Args:
        name: name of the subscription.
        seat: place of this process among the ranks and roles that train the subscription.
        job: identifies the ranks of one launch; a rank does not follow an owner of another job. '' if unknown: a rank
        with a batch of one owner then does not follow another.
        waiting: reports waits for the owner.
    """

    def __init__(self, control: Control, keys: Keys, name: str, seat: Seat, job: str, waiting: Waiting) -> None:
        self._control = control
        self._keys = keys
        self._name = name
        self._seat = seat
        self._job = job
        self._waiting = waiting
        #: Token of the owner; '' before it is known.
        self.token = ""
        self.gen = 0
        #: Last committed batch known to this rank.
        self.cursor = 0
        #: True once this rank read or committed a batch under its owner, after which it follows no other owner.
        self.bound = False
        self._lost = ""
        self._stop = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def take(self, token: str, deadline: float) -> None:
        """Acquire the subscription with ``token``; block while a dead owner's lease runs out.

        Args:
            deadline: time on the monotonic clock.

            Raises:
            ConfigError: another trainer with this name is alive.
            WaitTimeout: ``deadline`` has passed.
        """
        left_before, renewals = float("inf"), 0
        while not (joined := self._try(token)).mine:
            # Counts renewals, even if the clock of Redis is set back.
            renewals += joined.holder_ms > left_before
            if renewals > 1:
                raise ConfigError(
                    f"Subscription {self._name!r} of run {self._keys.run!r} is owned by a live trainer: "
                    "stop it, or use another name."
                )
            left_before = joined.holder_ms
            self._pause(min(0.2, joined.holder_ms / 1000 + 0.01), deadline, LeaseHeld("trainer"))

    def take_if_free(self, token: str) -> bool:
        """Acquire the subscription unless another trainer holds its lease. Blocks for one round trip."""
        return self._try(token).mine

    def keep(self) -> None:
        """Renew the lease in a separate thread until ``stop``. Returns at once."""
        self._heartbeat = threading.Thread(target=self._beat, name=f"owner-{self._name}", daemon=True)
        self._heartbeat.start()

    def stop(self) -> None:
        """Stop renewing the lease. Blocks until the thread has ended."""
        self._stop.set()
        if self._heartbeat is not None:
            self._heartbeat.join()

    def release(self) -> None:
        """Release the subscription for the next trainer if Redis is available. Blocks for one round trip."""
        if not (self._seat.leads and self.token):
            return
        try:
            scripts.run(self._control.client, scripts.leave(self._keys, self._name, self.token))
        except PASSING as exc:
            log.warning("failed to release the subscription: %s", exc)

    def begin(self, gen: int, cursor: int) -> None:
        """Set generation and cursor, so that a thread that reads both in this order never gets an older cursor."""
        self.cursor = cursor
        self.gen = gen

    def regain(self, cursor: int) -> bool:
        """Return whether a rewind to ``cursor`` with a lost reply succeeded: next generation, same owner."""
        before = self.gen
        joined = self._join()
        if not (joined.mine and joined.gen == before + 1 and joined.cursor == cursor):
            return False
        self.begin(joined.gen, cursor)
        return True

    def _try(self, token: str) -> scripts.Joined:
        self.token = token
        joined = self._join(self._job)
        if joined.mine:
            self.begin(joined.gen, joined.cursor)
        return joined

    def _join(self, job: str = "") -> scripts.Joined:
        lease_ms = int(OWNER_LEASE_S * 1000)
        return self._control.call(scripts.join(self._keys, self._name, self.token, lease_ms, job=job))

    def _beat(self) -> None:
        """Renew the lease until ``stop``; errors stop the trainer at its next step."""
        try:
            self._renew()
        except QueueUnavailable as exc:
            if not self._stop.is_set():
                self._lost = str(exc)
        except Exception as exc:
            self._lost = f"Failed to renew the ownership of subscription {self._name!r}: {exc}"
        if self._lost:
            log.error("%s", self._lost)

    def _renew(self) -> None:
        # Use a separate connection, so that renewals do not wait for the trainer's reads.
        control = Control(self._control.url, stopped=self._stop.is_set)
        call = scripts.join(self._keys, self._name, self.token, int(OWNER_LEASE_S * 1000), only_renew=True)
        while not self._stop.wait(OWNER_LEASE_S / 3):
            if not control.call(call).mine:
                self._lost = f"Another trainer took over subscription {self._name!r}: stop this one."
                break
        control.close()

    def follow(self, deadline: float, *, alive: bool = False) -> None:
        """Adopt the token of rank 0 of this job; block until it has one.

        Args:
            deadline: on the monotonic clock.
            alive: wait for a renewal of the lease, as a killed owner keeps its lease for a while.

        Raises:
            WaitTimeout: ``deadline`` has passed.
        """
        seen, left = b"", float("inf")
        while True:
            held, left_ms = self._control.do(self._holder)
            token, gen, cursor, job = self._control.do(
                lambda client: client.hmget(self._keys.sub(self._name), "owner", "gen", "cursor", "job")
            )
            if held is not None and held == token and not self._is_of_another_job(job):
                is_mine = bool(self._job) and name_shown(job or b"") == self._job
                renewed = left_ms > FRESH_MS or (held == seen and left_ms > left)
                if not alive or is_mine or renewed:
                    self.token = name_shown(token)
                    self.begin(read_count(gen, "gen", self._name), read_count(cursor, "cursor", self._name))
                    return
                seen, left = held, left_ms
            self._pause(0.1, deadline, RankNotJoined(self._name))

    def await_driver(self, deadline: float) -> None:
        """Block until the driving role has rewound to its checkpoint and requested a batch (T13).

        Token, generation and cursor are final then. Raises WaitTimeout at ``deadline``.
        """
        while True:
            self.follow(deadline)
            asker = self._control.do(lambda client: client.hget(self._keys.sub(self._name), "asker"))
            if asker is not None and name_shown(asker) == self.token:
                self.follow(deadline)
                self._waiting.end()
                return
            self._pause(0.05, deadline, RoleNotStarted(self._name, self._seat.roles[0]))

    def bind(self) -> None:
        """Bind this rank to its current owner for the rest of the process (T14).

        Blocks for one round trip unless this rank is the owner. Raises OwnershipLost.
        """
        if self._seat.leads or not self._seat.drives:
            return
        token = self._control.do(lambda client: client.hget(self._keys.sub(self._name), "owner"))
        if token is None or name_shown(token) != self.token:
            self.refollow()
        self.bound = True

    def refollow(self) -> None:
        """Adopt a new generation after a rewind of rank 0, or its replacement before this rank's first batch."""
        if self._seat.leads or not self._seat.drives:
            raise self.not_ours()
        token, gen = self.token, self.gen
        job = self._control.do(lambda client: client.hget(self._keys.sub(self._name), "job"))
        if self._is_of_another_job(job):
            raise self.not_ours()
        self.follow(time.monotonic() + OWNER_LEASE_S * 2)
        renewed = self.token == token and self.gen > gen
        if not renewed and (self.bound or self.token == token):
            raise self.not_ours()

    def _holder(self, client: Client) -> tuple[bytes | None, int]:
        """Return the owner's token and the remaining time of its lease in ms."""
        key = self._keys.owner(self._name)
        return client.get(key), int(client.pttl(key))

    def _is_of_another_job(self, job: bytes | None) -> bool:
        """Return whether the owner belongs to another job, if both jobs are known."""
        return bool(self._job and job) and name_shown(job or b"") != self._job

    def check(self) -> None:
        """Raise OwnershipLost if another trainer took over."""
        if self._lost:
            raise OwnershipLost(self._lost)

    def check_lineage(self, gen: int) -> None:
        """Raise OwnershipLost if the subscription was rewound or taken over. Blocks for one round trip."""
        self.check()
        token, now = self._control.do(lambda client: client.hmget(self._keys.sub(self._name), "owner", "gen"))
        if token is None or name_shown(token) != self.token or read_count(now, "gen", self._name) != gen:
            raise self.not_ours()

    def not_ours(self) -> OwnershipLost:
        advice = "" if self._seat.drives else f" Restore role {self._seat.role} from a checkpoint and start it again."
        return OwnershipLost(
            f"Subscription {self._name!r} was taken over or rewound by another trainer; nothing was changed.{advice}"
        )

    def _pause(self, seconds: float, deadline: float, cause: Cause) -> None:
        self._waiting.blocked_on(cause)
        if time.monotonic() >= deadline:
            raise WaitTimeout(f"Subscription {self._name!r} timed out waiting for {cause}.", cause=cause)
        time.sleep(seconds)
