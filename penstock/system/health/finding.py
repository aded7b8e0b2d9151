"""Findings: what was looked at, how bad it is, and what to do about it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import redis

from penstock.errors import PenstockError
from penstock.redaction import redact
from penstock.text import format_exc


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    #: What was looked at.
    what: str
    level: Level
    #: What was found.
    found: str
    #: What to do about it; '' where nothing is to be done.
    todo: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of all checks, each as it comes; one that fails is a finding itself. Blocks for seconds."""
    for what, check in checks:
        try:
            yield from check()
        except (PenstockError, redis.RedisError, OSError, ValueError) as exc:
            told = str(exc) if isinstance(exc, PenstockError) else format_exc(exc)
            yield Finding(what, Level.ERROR, redact(told))


def passes(what: str, check: Callable[[], object], fine: str) -> Finding:
    """A finding of a check that says by an error of penstock what is wrong."""
    try:
        check()
    except PenstockError as exc:
        return Finding(what, Level.ERROR, redact(str(exc)))
    return Finding(what, Level.OK, fine)
