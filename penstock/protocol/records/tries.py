"""The tries of a job: who held it when, and how each lease ended.

The field ``tr`` of the hash ``group:JOB`` is ``LANE:WORKER:LEASED_MS`` of each, with ``;`` between them, and behind it
``:ENDED_MS:HOW`` where it ended; a try that committed the last sample has no end of its own, for the group says when it
was ready. ``+N;`` before them stands for N earlier ones that are left out.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ProtocolError
from penstock.words import shown

#: Most characters of the tries of one job.
MAX_TRIES_BYTES = 16 * 1024

#: Milliseconds; up to the year 5138.
_TIME = r"[0-9]{1,14}"
_ONE = re.compile(rf"([a-z_]{{1,32}}):([^:;]{{0,255}}):({_TIME})(?::({_TIME}):([^:;]{{1,100}}))?")
_EARLIER = re.compile(r"\+([0-9]{1,18});")


class TryEnd(StrEnum):
    """How a try ended. ``failed`` and ``crashed`` may be followed by why, with a blank between."""

    #: It is under way.
    OPEN = ""
    #: With the last sample committed.
    COMMITTED = "committed"
    #: The worker handed it back: it was stopped, or its engine was restarted.
    RELEASED = "released"
    #: Its worker died of an error, and handed it back.
    DIED = "died"
    #: The reply to its lease was lost, and the worker handed it back.
    UNHEARD = "unheard"
    #: Nobody renewed its lease.
    RECLAIMED = "reclaimed"
    #: The engine died under it.
    CRASHED = "crashed"
    #: Reward, environment, engine or arrays failed it; the ``JobFailure`` follows.
    FAILED = "failed"
    #: The group was closed with what was committed, or given up, for it took too long.
    SHORTENED = "shortened"
    TIMED_OUT = "timed_out"
    #: An operator cancelled it.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Try:
    """One lease of a job."""

    #: Which one it was, from 1.
    number: int
    lane: str
    worker: str
    #: Unix seconds.
    leased_s: float
    #: Unix seconds; 0: it is under way, or nobody told.
    ended_s: float
    #: A ``TryEnd``, with what follows it.
    end: str


def tries_of(text: str, what: str, *, ready_s: float = 0.0) -> list[Try]:
    """The tries in a field ``tr``, the earliest first; [] of ''.

    Args:
        ready_s: when the group was ready (Unix seconds); 0: it is not.

    Raises:
        ProtocolError: no verb wrote that; it begins with ``what``.
    """
    if not text:
        return []
    earlier = _EARLIER.match(text)
    found = [_ONE.fullmatch(one) for one in text[earlier.end() if earlier else 0 :].split(";")]
    if len(text) > MAX_TRIES_BYTES or not all(found):
        raise ProtocolError(f"{what} holds tries that no lease wrote: {shown(text[:200])}.")
    first = 1 + (int(earlier[1]) if earlier else 0)
    return [_try(number, one, ready_s) for number, one in enumerate(found, first) if one]


def _try(number: int, found: re.Match[str], ready_s: float) -> Try:
    lane, worker, leased, ended, how = found.groups()
    ended_s, end = (int(ended) / 1000, how) if ended else (ready_s, TryEnd.COMMITTED if ready_s else TryEnd.OPEN)
    return Try(number, lane, worker, int(leased) / 1000, ended_s, end)
