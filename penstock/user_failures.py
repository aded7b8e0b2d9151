"""When so many jobs die of the user's own code that the data would be burned for nothing: admission stops.

Workers note how jobs end, per dataset and what judges them (reward, environment); the last ``reward.died_window`` of
each are remembered. Deaths of the engine do not count. The producer admits nothing more and says why, `penstock run`
ends with the reason, and a start of either forgets what was.
"""

from collections.abc import Mapping

from penstock.config import RewardConfig
from penstock.control import Client
from penstock.keys import Keys
from penstock.words import writable

#: Outcomes of jobs that died of the user's code.
OUTCOMES = frozenset(
    {"reward_raised", "reward_timeout", "reward_not_a_number", "reward_too_large", "environment_raised",
     "environment_timeout"}
)  # fmt: skip


def too_many(client: Client, keys: Keys, config: RewardConfig) -> str:
    """Why nothing more may be admitted; '' while it may. Blocks for one round trip."""
    return judge(client.hgetall(keys.ends), config)


def judge(ends: Mapping[bytes, bytes], config: RewardConfig) -> str:
    """As :func:`too_many`, of what is remembered: ``d:KIND`` digits, ``w:KIND`` last words."""
    for field, digits in sorted(ends.items()):
        if not field.startswith(b"d:"):
            continue
        last = digits[-config.died_window :]
        died = last.count(b"1")
        if len(last) >= config.died_from and died > config.max_died_share * len(last):
            kind, words = field[2:], ends.get(b"w:" + field[2:], b"")
            return writable(
                f"{died} of the last {len(last)} jobs of {kind.decode(errors='replace')[:400]} died of it, and "
                f"reward.max_died_share is {config.max_died_share:g}; the last one: "
                f"{words.decode(errors='replace')[:1000]}"
            )
    return ""


def forget(client: Client, keys: Keys) -> None:
    """Begin anew: whoever starts a run or its producer has mended what was wrong."""
    client.delete(keys.ends)
