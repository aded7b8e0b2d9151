"""Ownership of a subscription: rank 0 of a trainer holds its lease, the other ranks use the same token.

    rank 0        take ─> keep: a thread renews the lease ─> stop ─> give back
    other ranks   follow rank 0 of their job ─> bind at the first batch ─> refollow where rank 0 rewound

Every rewind raises the generation. A rank that lost the subscription gets OwnershipLost at its next step, never a
silent wait.
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

#: The lease expires when the leader rank has not renewed it for so long.
OWNER_LEASE_S = 6.0
#: A lease with more time left was renewed recently, by a live owner.
FRESH_MS = int(1000 * OWNER_LEASE_S) - 500


class Ownership:
    """Token and generation under which one rank acts on a subscription.

    Args:
        name: the subscription.
        seat: place of this process among the ranks and roles that train the subscription.
        job: identifies the ranks of one start of a trainer; a rank follows no owner of another job. '': unknown, then a
            rank that got a batch under one owner follows no other.
        waiting: reports the owner that is waited for.
    """

    def __init__(self, control: Control, keys: Keys, name: str, seat: Seat, job: str, waiting: Waiting) -> None:
        self._control = control
        self._keys = keys
        self._name = name
        self._seat = seat
        self._job = job
        self._waiting = waiting
        #: Token of the owner, '' before there is one.
        self.token = ""
        self.gen = 0
        #: Last committed batch, as far as this rank knows.
        self.cursor = 0
        #: True once this rank got a batch under its owner, or committed one: then it follows no other.
        self.bound = False
        self._lost = ""
        self._stop = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def take(self, token: str, deadline: float) -> None:
        """Acquire the subscription under ``token``; block while a dead owner's lease runs out.

        Args:
            deadline: on the monotonic clock.

        Raises:
            ConfigError: another trainer with this name is alive.
            WaitTimeout: ``deadline`` has passed.
        """
        left_before, renewals = float("inf"), 0
        while not (joined := self._try(token)).mine:
            # Rises with each renewal, even if the clock of Redis is set back.
            renewals += joined.holder_ms > left_before
            if renewals > 1:
                raise ConfigError(
                    f"Subscription {self._name!r} of run {self._keys.run!r} belongs to a trainer that is alive: "
                    "stop it, or give this one another name."
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

    def give_back(self) -> None:
        """Release the subscription at once for the next trainer, if Redis answers. Blocks for one round trip."""
        if not (self._seat.leads and self.token):
            return
        try:
            scripts.run(self._control.client, scripts.leave(self._keys, self._name, self.token))
        except PASSING as exc:
            log.warning("failed to release the subscription: %s", exc)

    def begin(self, gen: int, cursor: int) -> None:
        """Set generation and cursor; a thread that reads both, in this order, never finds a cursor of an older one."""
        self.cursor = cursor
        self.gen = gen

    def regain(self, cursor: int) -> bool:
        """Return whether a rewind to ``cursor`` succeeded, though its reply was lost: next generation, same owner."""
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
        """Renew the ownership until ``stop``; any error stops the trainer at its next step."""
        try:
            self._renew()
        except QueueUnavailable as exc:
            if not self._stop.is_set():
                self._lost = str(exc)
        except Exception as exc:
            self._lost = f"The ownership of subscription {self._name!r} cannot be renewed: {exc}"
        if self._lost:
            log.error("%s", self._lost)

    def _renew(self) -> None:
        # A separate connection: a renewal must not wait behind the trainer's reads.
        control = Control(self._control.url, stopped=self._stop.is_set)
        call = scripts.join(self._keys, self._name, self.token, int(OWNER_LEASE_S * 1000), only_renew=True)
        while not self._stop.wait(OWNER_LEASE_S / 3):
            if not control.call(call).mine:
                self._lost = f"Another trainer took subscription {self._name!r} over; this one must stop."
                break
        control.close()

    def follow(self, deadline: float, *, alive: bool = False) -> None:
        """Adopt the token that rank 0 of this job holds; block until it holds one.

        Args:
            deadline: on the monotonic clock.
            alive: only once it has renewed its lease; a killed owner still holds one for a while.

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
        """Block until the driving role has rewound to what it restored, and requested a batch (T13).

        Then token, generation and cursor are final. Raises WaitTimeout past ``deadline``.
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
        """Bind this rank to its present owner, from its first batch on, for the life of the process (T14).

        Blocks for one round trip on a rank that owns nothing. Raises OwnershipLost.
        """
        if self._seat.leads or not self._seat.drives:
            return
        token = self._control.do(lambda client: client.hget(self._keys.sub(self._name), "owner"))
        if token is None or name_shown(token) != self.token:
            self.refollow()
        self.bound = True

    def refollow(self) -> None:
        """Adopt a new generation if rank 0 rewound, or was replaced before this rank's first batch."""
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
        """Return the owner's token and the remaining time of its lease, in ms."""
        key = self._keys.owner(self._name)
        return client.get(key), int(client.pttl(key))

    def _is_of_another_job(self, job: bytes | None) -> bool:
        """Return whether both jobs are known and differ: that owner was started with another job than this rank."""
        return bool(self._job and job) and name_shown(job or b"") != self._job

    def check(self) -> None:
        """Raise OwnershipLost if another trainer took over."""
        if self._lost:
            raise OwnershipLost(self._lost)

    def check_lineage(self, gen: int) -> None:
        """Raise OwnershipLost if the subscription was rewound or taken over since. Blocks for one round trip."""
        self.check()
        token, now = self._control.do(lambda client: client.hmget(self._keys.sub(self._name), "owner", "gen"))
        if token is None or name_shown(token) != self.token or read_count(now, "gen", self._name) != gen:
            raise self.not_ours()

    def not_ours(self) -> OwnershipLost:
        what_now = "" if self._seat.drives else f" Restore role {self._seat.role} from a checkpoint and start it again."
        return OwnershipLost(
            f"Subscription {self._name!r} belongs to another trainer by now, or was rewound by it; nothing was "
            f"changed.{what_now}"
        )

    def _pause(self, seconds: float, deadline: float, cause: Cause) -> None:
        self._waiting.blocked_on(cause)
        if time.monotonic() >= deadline:
            raise WaitTimeout(f"Subscription {self._name!r} gave up waiting for {cause}.", cause=cause)
        time.sleep(seconds)
