"""Findings: what was checked, the severity, and what to do about it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import redis

from penstock.errors import PenstockError
from penstock.redaction import redact
from penstock.text import format_exc


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    #: Name of the check.
    what: str
    level: Level
    #: Result, as text.
    found: str
    #: What to do about it; '' if nothing.
    todo: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of all checks, each as it comes; a failed check is a finding itself. Blocks for seconds."""
    for what, check in checks:
        try:
            yield from check()
        except (PenstockError, redis.RedisError, OSError, ValueError) as exc:
            told = str(exc) if isinstance(exc, PenstockError) else format_exc(exc)
            yield Finding(what, Level.ERROR, redact(told))


def passes(what: str, check: Callable[[], object], fine: str) -> Finding:
    """Return the finding of a check that raises one of penstock's errors if something is wrong."""
    try:
        check()
    except PenstockError as exc:
        return Finding(what, Level.ERROR, redact(str(exc)))
    return Finding(what, Level.OK, fine)
