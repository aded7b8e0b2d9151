"""Stop admission if too many jobs fail because of the user's code or data, so that the data is not used up.

Workers record how jobs end, per dataset and reward or environment; the last ``WINDOW`` results of each are kept.
 Engine crashes do not count. Refused jobs of the configured data (such as prompts longer than the context) count
only if all of them are refused, since a few are normal. The producer then stops with the reason, `penstock run` ends
with it, and a start of either clears the results.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.config import RewardConfig
from penstock.errors import ProtocolError
from penstock.names import Lane
from penstock.protocol.scripts import pause as pause_call
from penstock.protocol.scripts import run
from penstock.records.causes import JobsFailing
from penstock.records.codec import name_shown, number_in, pack, unpack_map
from penstock.records.job import JobFailure
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import utf8_safe

#: Most characters of the name of the user who paused a lane.
MAX_BY = 200


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused lane, who paused it ('' if unknown), and for how many seconds it has been paused."""

    lane: str
    by: str = ""
    since_s: float = 0.0


def pause(client: Client, keys: Keys, lane: Lane, by: str) -> bool:
    """Pause a lane; return False if it was paused already. Blocks for a round trip."""
    return run(client, pause_call(keys, lane, pack({"by": by[:MAX_BY], "at": time.time()})))


def resume(client: Client, keys: Keys, lane: Lane) -> bool:
    """Resume a lane; return False if it was not paused. Blocks for a round trip."""
    return run(client, pause_call(keys, lane, b""))


def parse_pauses(lanes: Iterable[bytes], by: Mapping[bytes, bytes], now: float) -> list[Pause]:
    """Parse the set ``paused`` and the hash ``paused_by``, by name. An unreadable record still means a paused lane."""
    return [_pause(lane, by.get(lane, b""), now) for lane in sorted(lanes)]


def _pause(lane: bytes, record: bytes, now: float) -> Pause:
    name = name_shown(lane)
    try:
        said = unpack_map(record, f"The pause of lane {name}") if record else {}
        by, at = said.get("by"), number_in(said, "at", f"The pause of lane {name}", now)
    except ProtocolError:
        return Pause(name)
    return Pause(name, by[:MAX_BY] if isinstance(by, str) else "", max(0.0, now - at))


#: Results that are kept of each kind, and results from which on their share of failures counts.
WINDOW, LEAST = 100, 20
#: Failures that are caused by the user's code.
OF_USER_CODE = frozenset({
    JobFailure.REWARD_RAISED, JobFailure.REWARD_TIMEOUT, JobFailure.REWARD_NOT_A_NUMBER, JobFailure.REWARD_TOO_LARGE,
    JobFailure.ENVIRONMENT_RAISED, JobFailure.ENVIRONMENT_TIMEOUT,
    JobFailure.HOOK_RAISED, JobFailure.HOOK_TIMEOUT, JobFailure.HOOK_UNPROVEN, JobFailure.MODEL_FAILED,
})  # fmt: skip


def digit_of(reason: str) -> str:
    """Return the digit for the end of a job: 1 if the user's code failed, 2 if the job was refused, else 0."""
    return "1" if reason in OF_USER_CODE else "2" if reason == JobFailure.REFUSED else "0"


def too_many(client: Client, keys: Keys, config: RewardConfig) -> JobsFailing | None:
    """Return why nothing more may be admitted, or None. Blocks for one round trip."""
    return judge(client.hgetall(keys.ends), config)


def judge(ends: Mapping[bytes, bytes], config: RewardConfig) -> JobsFailing | None:
    """Evaluate the recorded results, ``d:KIND`` digits and ``w:KIND`` last errors; see :func:`too_many`."""
    for field, digits in sorted(ends.items()):
        if not field.startswith(b"d:"):
            continue
        last = digits[-WINDOW:]
        died, refused = last.count(b"1"), last.count(b"2")
        if len(last) < LEAST or config.max_died_share >= 1:
            continue
        kind = field[2:].decode(errors="replace")[:400]
        words = ends.get(b"w:" + field[2:], b"").decode(errors="replace")[:1000]
        if died > config.max_died_share * len(last) or refused == len(last):
            return JobsFailing(utf8_safe(kind), len(last), died, refused, config.max_died_share, utf8_safe(words))
    return None


def forget(client: Client, keys: Keys) -> None:
    """Clear the results at the start of a run or a producer."""
    client.delete(keys.ends)
