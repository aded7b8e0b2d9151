"""Log a repeated traceback in full once, then once a minute with its count."""

import logging
import time
from dataclasses import dataclass

#: Seconds between two log entries of the same failure.
EVERY_S = 60.0
#: Failures that are distinguished; beyond that, the oldest is forgotten.
MOST = 256

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Logged:
    at: float
    since: int = 0


class Repeats:
    """Rate-limited warnings of one worker."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, ...], _Logged] = {}

    def warn(self, failure: BaseException | None, message: str, reason: str = "") -> None:
        """Log ``message`` with the traceback of ``failure``, unless a similar failure was logged within a minute."""
        key, now = (reason, *_key_of(failure)), time.monotonic()
        logged = self._logged.get(key)
        if logged is not None and now - logged.at < EVERY_S:
            logged.since += 1
            return
        more = f" ({logged.since} more like it since the last entry)" if logged and logged.since else ""
        self._logged.pop(key, None)
        if len(self._logged) >= MOST:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = _Logged(now)
        log.warning("%s%s", message, more, exc_info=failure)


def _key_of(failure: BaseException | None) -> tuple[str, ...]:
    """Return the key of a failure: types and lines, along the chain of its causes."""
    found: list[str] = []
    while failure is not None and len(found) < 16:
        at = failure.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else ""
        found.append(f"{type(failure).__name__} {where}")
        failure = failure.__cause__
    return tuple(found)
