"""Loss of a run's data in Redis: keys that were deleted or evicted, and admitted jobs that are in no queue.

Processes that need such a key wait (``KeysLost`` passes as soon as it is back), and `penstock why` names it.
"""

from dataclasses import dataclass

from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.protocol.records.causes import RedisKeysLost
from penstock.redis.call import Call, script, texts
from penstock.redis.commands import Client
from penstock.redis.refusals import RECOVERY, KeysLost

#: Most keys that are named; the others are counted.
NAMED = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """The missing keys and jobs; false if nothing is missing."""

    #: Names of keys, without the prefix of the run.
    keys: tuple[str, ...] = ()
    #: Admitted jobs that are in no lane and no other container, and jobs admitted.
    jobs: int = 0
    admitted: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.jobs)

    def error(self) -> KeysLost:
        """Return the error of a verb that fails because of it."""
        return KeysLost(f"Redis lost {self}, as after FLUSHALL, a deletion or an eviction. {RECOVERY}", self.cause)

    @property
    def cause(self) -> RedisKeysLost:
        """The cause of a wait because of it."""
        more = len(self.keys) - NAMED
        return RedisKeysLost(
            (*self.keys[:NAMED], *([f"{more} more keys"] if more > 0 else [])), self.jobs, self.admitted
        )

    def __str__(self) -> str:
        """Name what was lost."""
        return self.cause.lost


def loss(keys: Keys) -> Call[Loss]:
    """Make the call that reads what Redis lost of a run, in one instant. Takes some microseconds; reads only."""
    names = [keys.schema, keys.counters, keys.subs, keys.source, keys.delayed, keys.bodies, keys.dead, keys.ready]
    arguments = [keys.prefix, *LANES]
    return Call(
        script("missing_keys"),
        [*names, *map(keys.jobs, LANES)],
        arguments,
        lambda answer: Loss(tuple(dict.fromkeys(texts(answer[2:]))), int(answer[0]), int(answer[1])),
    )


def evicting_policy(client: Client) -> str:
    """Return the policy by which Redis may delete keys of a run; '' if it deletes none. Blocks for a round trip."""
    policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
    return "" if policy == "noeviction" else policy
