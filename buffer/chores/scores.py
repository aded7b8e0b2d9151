"""Results of scoring jobs that were not collected: the client is gone, and no subscription will retire them.

Clients collect their scores and retire the groups (consumers/scorer.py). A client that died leaves them behind.
"""

import logging
import time

from penstock.buffer.state import State
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client

log = logging.getLogger(__name__)


class UnreadScores:
    """Retires scored groups that are ready for longer than ``ttl_s``, counted from when this leader first read them."""

    def __init__(self, client: Client, keys: Keys, state: State, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._ttl_s = ttl_s
        self._seen: dict[str, float] = {}

    def retire_unread(self) -> int:
        """Check once; return the number of retired groups. Blocks for a round trip for each."""
        now = time.monotonic()
        there = [job for job, group in self._state.groups.items() if group.lane == Lane.SCORE]
        self._seen = {job: self._seen.get(job, now) for job in there}
        late = [job for job, at in self._seen.items() if now - at >= self._ttl_s]
        retired = 0
        for job in late:
            outcome = scripts.run(self._client, scripts.collect(self._keys, job, Lane.SCORE))
            if outcome != "subscribed":
                self._state.forget([job])
            retired += outcome == "retired"
        if retired:
            log.warning("%d scoring jobs were not collected within %g s and are deleted", retired, self._ttl_s)
        return retired
