"""When so many jobs die of what the user gave that the data would be burned for nothing: admission stops.

Workers note how jobs end, per dataset and what judges them (reward, environment); the last ``reward.died_window`` of
each are remembered. Deaths of the engine do not count. Jobs of the configured data that are refused (a prompt longer
than the context, say) count where there are no others, since a few of them are what the data are like. The producer
admits nothing more and says why, `penstock run` ends with the reason, and a start of either forgets what was.
"""

from collections.abc import Mapping

from penstock.config import RewardConfig
from penstock.protocol.keys import Keys
from penstock.protocol.records.causes import JobsFailing
from penstock.protocol.records.job import JobFailure
from penstock.redis.commands import Client
from penstock.words import writable

#: What jobs fail of that is the user's code.
OF_USER_CODE = frozenset({
    JobFailure.REWARD_RAISED, JobFailure.REWARD_TIMEOUT, JobFailure.REWARD_NOT_A_NUMBER, JobFailure.REWARD_TOO_LARGE,
    JobFailure.ENVIRONMENT_RAISED, JobFailure.ENVIRONMENT_TIMEOUT,
    JobFailure.HOOK_RAISED, JobFailure.HOOK_TIMEOUT, JobFailure.HOOK_UNPROVEN, JobFailure.MODEL_FAILED,
})  # fmt: skip


def digit_of(reason: str) -> str:
    """How the end of a job is remembered: 1 where it died of the user's code, 2 where it was refused, else 0."""
    return "1" if reason in OF_USER_CODE else "2" if reason == JobFailure.REFUSED else "0"


def too_many(client: Client, keys: Keys, config: RewardConfig) -> JobsFailing | None:
    """Return why nothing more may be admitted; None while it may. Blocks for one round trip."""
    return judge(client.hgetall(keys.ends), config)


def judge(ends: Mapping[bytes, bytes], config: RewardConfig) -> JobsFailing | None:
    """As :func:`too_many`, of what is remembered: ``d:KIND`` digits, ``w:KIND`` last words."""
    for field, digits in sorted(ends.items()):
        if not field.startswith(b"d:"):
            continue
        last = digits[-config.died_window :]
        died, refused = last.count(b"1"), last.count(b"2")
        if len(last) < config.died_from or config.max_died_share >= 1:
            continue
        kind = field[2:].decode(errors="replace")[:400]
        words = ends.get(b"w:" + field[2:], b"").decode(errors="replace")[:1000]
        if died > config.max_died_share * len(last) or refused == len(last):
            return JobsFailing(writable(kind), len(last), died, refused, config.max_died_share, writable(words))
    return None


def forget(client: Client, keys: Keys) -> None:
    """Start over: whoever starts a run or its producer has corrected what was wrong."""
    client.delete(keys.ends)
