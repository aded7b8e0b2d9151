"""What Redis lost of a run: keys that were deleted or evicted, and admitted jobs that no queue holds any more.

Parts that meet such a key wait (``KeysLost`` passes as soon as it is back), and `penstock why` names it.
"""

from dataclasses import dataclass

from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.redis.call import Call, script, texts
from penstock.redis.commands import Client
from penstock.redis.refusals import RECOVERY, KeysLost

#: Keys that are named; the rest is counted.
NAMED = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """What is missing; false where nothing is."""

    #: Names of keys, without the prefix of the run.
    keys: tuple[str, ...] = ()
    #: Admitted jobs that are in no lane and no other container, and jobs admitted.
    jobs: int = 0
    admitted: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.jobs)

    def error(self) -> KeysLost:
        """Return the error of a verb that fails for it."""
        return KeysLost(f"Redis lost {self}, as after FLUSHALL, a deletion or an eviction. {RECOVERY}")

    def __str__(self) -> str:
        """Name what was lost."""
        more = len(self.keys) - NAMED
        words = [*self.keys[:NAMED], *([f"{more} more keys"] if more > 0 else [])]
        if self.jobs:
            words.append(f"{self.jobs} of {self.admitted} admitted jobs")
        return ", ".join(words)


def loss(keys: Keys) -> Call[Loss]:
    """Look for what Redis lost of a run, in one instant. Takes it some microseconds; reads only."""
    names = [keys.schema, keys.counters, keys.subs, keys.source, keys.delayed, keys.bodies, keys.dead, keys.ready]
    arguments = [keys.prefix, *LANES]
    return Call(
        script("missing_keys"),
        [*names, *map(keys.jobs, LANES)],
        arguments,
        lambda answer: Loss(tuple(dict.fromkeys(texts(answer[2:]))), int(answer[0]), int(answer[1])),
    )


def policy_trouble(client: Client) -> str:
    """Return why Redis may delete keys of a run at any time; '' where it does not. Blocks for a round trip."""
    policy = client.info("memory").get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    return f"maxmemory-policy noeviction: it is {policy}, so Redis deletes keys of the run when it is full"
