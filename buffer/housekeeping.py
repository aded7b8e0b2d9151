"""Periodic tasks of the leader besides cutting.

| task | effect |
|---|---|
| retire | due retries are queued; unused groups are disposed of, sealed and swept; holdings are published |
| forgotten | payloads whose commits Redis has lost get a time to live |
| reclaim | jobs of dead workers are queued again |
| late | groups that time out are shortened, dropped or reported |
| tidy | records of dead processes are deleted |
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from penstock.buffer import limits
from penstock.buffer.chores.forgotten_payloads import ForgottenPayloads
from penstock.buffer.chores.holdings import HeldForHistory, Holdings
from penstock.buffer.chores.partial_groups import PartialGroups
from penstock.buffer.chores.scores import UnreadScores
from penstock.buffer.chores.unread_evaluations import UnreadEvaluations
from penstock.buffer.payload_servers import PayloadServers
from penstock.buffer.retire import Retirement
from penstock.buffer.state import State
from penstock.config import Config
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.scripts import Leadership
from penstock.protocol.waits import Waiting
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Interval of retirement, and of tidying.
RETIRE_S, TIDY_S = 0.25, 60.0
#: Interval of checks for groups that time out.
LATE_S = 0.5
#: Jobs queued again per call, after a wait or from a lease; calls are repeated until there are no more.
CHUNK = 256


class Housekeeping:
    """Runs the periodic tasks while this buffer leads.

    Args:
        reclaimer: the name under which expired leases are taken over.
        alive: called between the steps of a long task; keeps the leadership, raises LeadershipLost.
        waiting: returns the wait to report under a name.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        lead: Leadership,
        state: State,
        servers: PayloadServers,
        config: Config,
        *,
        reclaimer: str,
        alive: Callable[[], None],
        waiting: Callable[[str], Waiting],
    ) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._servers = servers
        self._config = config
        self._reclaimer = reclaimer
        self._alive = alive
        self._waiting = waiting
        self._retirement = Retirement(
            client, keys, servers, lead, state, retention_s=config.buffer.retention_s, alive=alive
        )
        self._partial = PartialGroups(client, keys, lead, config.rollout, waiting("buffer:late"))
        self._scores = UnreadScores(client, keys, state, config.buffer.score_ttl_s)
        self._evaluations = UnreadEvaluations(
            client, keys, state, config.run_dir, config.buffer.eval_ttl_s,
            waiting=waiting("evaluations"), alive=alive,
        )  # fmt: skip
        self._forgotten = ForgottenPayloads(client, keys, servers, config.buffer.payload_ttl_s)
        self._holdings = Holdings(client, keys)
        self._history = HeldForHistory(client, keys, lead)
        self._retire = _Interval(RETIRE_S)
        # A check of many leases is not cheap: 87 ms for 64k of them.
        self._reclaim = _Interval(min(1.0, config.worker.lease_s / 5))
        self._tidy = _Interval(TIDY_S)
        self._late = _Interval(LATE_S)

    def tend(self, last_event: str, *, checkpointed: bool) -> None:
        """Run the tasks that are due. Blocks for a few round trips, or more. Raises LeadershipLost.

        Args:
            last_event: the newest event that the leader has read.
            checkpointed: a trainer has a new checkpoint, so groups may be ready to retire.
        """
        if self._retire.begin() or checkpointed:
            self._retire_groups(last_event)
        if self._reclaim.begin():
            self._reclaim_leases()
        if self._late.begin():
            self._partial.tend()
        if self._tidy.begin():
            self._retirement.tidy()
            self._retirement.expire(self._config.buffer.payload_ttl_s)

    def _retire_groups(self, last_event: str) -> None:
        state = self._state
        state.refresh()
        state.catch_up()
        state.look_at_servers()
        away = limits.held_for_servers(self._servers.away(), state.away.values())
        self._waiting("buffer:payloads").blocked_on(away)
        state.settle()
        while scripts.run(self._client, scripts.due(self._keys, CHUNK)) == CHUNK:
            self._alive()
        self._retirement.park()
        self._retirement.seal()
        self._history.tend()
        self._retirement.sweep()
        self._retirement.trim(last_event)
        self._forgotten.tend()
        self._holdings.tell(state)
        self._scores.retire_unread()
        self._evaluations.tend()

    def _reclaim_leases(self) -> None:
        """Queue every job of a dead worker again, a chunk at a time, since others use Redis meanwhile."""
        lease_ms = int(self._config.worker.lease_s * 1000)
        taken: Counter[tuple[str, str]] = Counter()
        for lane in LANES:
            while True:
                self._alive()
                call = scripts.reclaim(self._keys, lane, self._reclaimer, lease_ms, CHUNK)
                moved = scripts.run(self._client, call)
                if isinstance(moved, str):
                    return  # not our turn
                taken.update((worker, where) for _, worker, where in moved)
                for job, worker, where in moved:
                    log.debug("job %s was taken from worker %s; it is in %s now", job, worker, where)
                if len(moved) < CHUNK:
                    break
        for (worker, where), count in taken.items():
            log.warning("%d jobs were taken from worker %s, whose leases ran out; they are in %s", count, worker, where)


class _Interval:
    """A task with an interval, due for the first time at once."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._at = 0.0

    def begin(self) -> bool:
        """Return whether the task is due, and start the next interval then."""
        now = time.monotonic()
        if now < self._at:
            return False
        self._at = now + self._every_s
        return True
