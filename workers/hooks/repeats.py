"""The same traceback again and again: logged whole once, then once a minute with how often it came."""

import logging
import time
from dataclasses import dataclass

#: Between two entries of the same failure.
EVERY_S = 60.0
#: Failures that are distinguished; beyond, the oldest is forgotten.
MOST = 256

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    at: float
    since: int = 0


class Repeats:
    """Warnings of one worker."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, ...], _Told] = {}

    def warn(self, failure: BaseException | None, message: str, reason: str = "") -> None:
        """Log ``message`` with the traceback of ``failure``, unless the like of it was logged within a minute."""
        key, now = (reason, *_place_of(failure)), time.monotonic()
        told = self._told.get(key)
        if told is not None and now - told.at < EVERY_S:
            told.since += 1
            return
        more = f" ({told.since} more like it since the last entry)" if told is not None and told.since else ""
        self._told.pop(key, None)
        if len(self._told) >= MOST:
            del self._told[next(iter(self._told))]
        self._told[key] = _Told(now)
        log.warning("%s%s", message, more, exc_info=failure)


def _place_of(failure: BaseException | None) -> tuple[str, ...]:
    """What distinguishes one failure from another: types and lines, down to what caused it."""
    found: list[str] = []
    while failure is not None and len(found) < 16:
        at = failure.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else ""
        found.append(f"{type(failure).__name__} {where}")
        failure = failure.__cause__
    return tuple(found)
