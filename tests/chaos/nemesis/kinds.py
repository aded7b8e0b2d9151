"""All kinds of faults, by name: ``FAMILY:WHAT``."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from tests.chaos.nemesis import (
    clock,
    disk,
    failover,
    membership,
    network,
    operator,
    payloads,
    rewinds,
    signals,
    storage,
)
from tests.chaos.nemesis.act import Kind

FAMILIES = (signals, network, storage, operator, membership, disk, clock, rewinds, payloads, failover)
KINDS: dict[str, Kind] = {name: kind for family in FAMILIES for name, kind in family.kinds().items()}


def chosen(patterns: Collection[str]) -> dict[str, Kind]:
    """Kinds by names or patterns (``kill:*``, ``net``: all of a family); all where there are none.

    Raises:
        ValueError: a pattern names no kind.
    """
    found: dict[str, Kind] = {}
    for pattern in patterns or ["*"]:
        of_it = {name: kind for name, kind in KINDS.items() if _names(pattern, name)}
        if not of_it:
            raise ValueError(f"{pattern!r} is no kind of fault: use {', '.join(sorted(KINDS))}, or FAMILY:*.")
        found |= of_it
    return found


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.partition(":")[0] == pattern
