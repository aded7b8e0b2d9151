"""The attempts of a job: which worker held it when, and how each lease ended.

The field ``tr`` of the hash ``group:JOB`` is ``LANE:WORKER:LEASED_MS`` of each, separated by ``;``, followed by
``:ENDED_MS:HOW`` if it ended; an attempt that committed the last sample has no end of its own, for the group records
when it was ready. ``+N;`` at the beginning stands for N earlier ones that are left out.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ProtocolError
from penstock.text import safe_repr

#: Most characters of the attempts of one job.
MAX_TRIES_BYTES = 16 * 1024

#: Milliseconds; up to the year 5138.
_TIME = r"[0-9]{1,14}"
_ONE = re.compile(rf"([a-z_]{{1,32}}):([^:;]{{0,255}}):({_TIME})(?::({_TIME}):([^:;]{{1,100}}))?")
_EARLIER = re.compile(r"\+([0-9]{1,18});")


class TryEnd(StrEnum):
    """How an attempt ended. ``failed`` and ``crashed`` may be followed by the reason, after a blank."""

    #: It is still running.
    OPEN = ""
    #: With the last sample committed.
    COMMITTED = "committed"
    #: The worker handed it back: it was stopped, or its engine was restarted.
    RELEASED = "released"
    #: Its worker ended by an error, and handed it back.
    DIED = "died"
    #: The reply to its lease was lost, and the worker handed it back.
    UNHEARD = "unheard"
    #: Its lease was not renewed.
    RECLAIMED = "reclaimed"
    #: The engine crashed under it.
    CRASHED = "crashed"
    #: Reward, environment, engine or arrays failed; the ``JobFailure`` follows.
    FAILED = "failed"
    #: The group took too long, and was closed with the committed samples, or dropped.
    SHORTENED = "shortened"
    TIMED_OUT = "timed_out"
    #: An operator cancelled it.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Try:
    """One lease of a job."""

    #: Number of the attempt, from 1.
    number: int
    lane: str
    worker: str
    #: Unix seconds.
    leased_s: float
    #: Unix seconds; 0: it is still running, or not known.
    ended_s: float
    #: A ``TryEnd``, with what follows it.
    end: str


def tries_of(text: str, what: str, *, ready_s: float = 0.0) -> list[Try]:
    """Parse the attempts in a field ``tr``, the earliest first; [] for ''.

    Args:
        ready_s: when the group was ready (Unix seconds); 0: it is not.

    Raises:
        ProtocolError: the field is invalid; begins with ``what``.
    """
    if not text:
        return []
    earlier = _EARLIER.match(text)
    found = [_ONE.fullmatch(one) for one in text[earlier.end() if earlier else 0 :].split(";")]
    if len(text) > MAX_TRIES_BYTES or not all(found):
        raise ProtocolError(f"{what} holds tries that no lease wrote: {safe_repr(text[:200])}.")
    first = 1 + (int(earlier[1]) if earlier else 0)
    return [_try(number, one, ready_s) for number, one in enumerate(found, first) if one]


def _try(number: int, found: re.Match[str], ready_s: float) -> Try:
    lane, worker, leased, ended, how = found.groups()
    ended_s, end = (int(ended) / 1000, how) if ended else (ready_s, TryEnd.COMMITTED if ready_s else TryEnd.OPEN)
    return Try(number, lane, worker, int(leased) / 1000, ended_s, end)
