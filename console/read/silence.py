"""Find silent parts of a run: killed or frozen ones. Pure: reads a snapshot only."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.protocol.presence import SILENT_S
from penstock.protocol.records.causes import PartSilent

#: Kinds of parts without which a run stalls -> prefix of their waits.
_PARTS = ("producer", "buffer")


def silences(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield (who, cause, for how many seconds) of each silent part, the longest silence first."""
    yield from sorted((*_parts(state), *_trainers(state), *_workers(state)), key=lambda one: -one[2])


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield kinds of which every process is silent; a restarted process has a new record."""
    for kind in _PARTS:
        newest = min((one for one in state["parts"] if one["part"] == kind), key=lambda one: one["age_s"], default=None)
        if newest is not None and newest["age_s"] >= SILENT_S:
            yield kind, PartSilent(newest["pid"], newest["host"]), float(newest["age_s"])


def _trainers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    for sub in state["subs"]:
        if sub.get("silent_s", 0.0) >= SILENT_S:
            yield f"trainer:{sub['name']}", PartSilent(), float(sub["silent_s"])


def _workers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield silent workers, except those whose heartbeat reports a stuck event loop, which is the cause."""
    waits = {one["who"] for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S}
    for one in state["workers"]:
        if one.age_s >= SILENT_S and f"worker:{one.name}:loop" not in waits:
            yield f"worker:{one.name}", PartSilent(one.pid, one.host), float(one.age_s)
