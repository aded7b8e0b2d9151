"""Groups that time out: a long answer delays the complete group, and a policy decides what to do.

    begun for longer than group_timeout_s ─> wait (default): nothing, but it is reported
                                          ├─> train: shorten to the committed samples (n is their number, T11)
                                          └─> drop: the group is deleted, its place at the gate is free

Training with fewer samples favours short answers: every manifest has the number of such groups and samples.
"""

import logging

from penstock.config import RolloutConfig
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.causes import GroupsLate
from penstock.protocol.scripts import Late, Leadership, run
from penstock.protocol.waits import Waiting
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Most groups per call.
MOST = 256


class PartialGroups:
    """Handles groups that time out.

    Args:
        waiting: reports groups that are waited for.
    """

    def __init__(self, client: Client, keys: Keys, lead: Leadership, config: RolloutConfig, waiting: Waiting) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._config = config
        self._waiting = waiting

    def tend(self) -> int:
        """Shorten or drop groups that time out; return their number. Blocks for round trips. LeadershipLost."""
        timeout_s = self._config.group_timeout_s
        if timeout_s is None:
            return 0
        late = run(self._client, scripts.late(self._keys, int(timeout_s * 1000), MOST))
        ended = [one for one in late if self._end(one)]
        self._tell([one for one in late if one not in ended], timeout_s)
        return len(ended)

    def _end(self, one: Late) -> bool:
        match self._config.on_group_timeout:
            case "wait":
                return False
            case "train":
                done = run(self._client, scripts.shorten(self._keys, self._lead, one.job, self._config.min_group))
            case "drop":
                done = run(self._client, scripts.drop(self._keys, self._lead, one.job))
        if done:
            what = f"is trained with {done} samples" if self._config.on_group_timeout == "train" else "is dropped"
            log.info("group %s %s of %d after %.0f s", one.job, what, one.wanted, one.age_s)
        return bool(done)

    def _tell(self, late: list[Late], timeout_s: float) -> None:
        if not late:
            self._waiting.end()
            return
        first = max(late, key=lambda one: one.age_s)
        policy = self._config.on_group_timeout
        cause = GroupsLate(len(late), timeout_s, first.job, first.committed, first.wanted, policy)
        self._waiting.blocked_on(cause)
